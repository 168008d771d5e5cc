/* The step from Python into a compiled segment, in one call.
 *
 * Plain CPython API and no torch header, so that one binary serves every version of torch. Optional: without it
 * `stax/runtime/launch.py` does the same through ctypes.
 *
 *   launch(entry, table, threads, slots, *tensors) -> int
 *       table[slots[i]] = tensors[i].data_ptr(), then entry(table, threads) with the interpreter's lock released.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyObject *s_data_ptr;

typedef int (*Entry)(void *const *, int);

static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  (void)self;
  if (n < 4 || !PyTuple_Check(args[3]) || PyTuple_GET_SIZE(args[3]) != n - 4) {
    PyErr_SetString(PyExc_TypeError, "launch(entry, table, threads, slots, *tensors), one slot for each tensor");
    return NULL;
  }
  Entry entry = (Entry)PyLong_AsVoidPtr(args[0]);
  void **table = (void **)PyLong_AsVoidPtr(args[1]);
  long threads = PyLong_AsLong(args[2]);
  if (PyErr_Occurred()) return NULL;
  if (!entry || !table) {
    PyErr_SetString(PyExc_ValueError, "launch: null entry or table");
    return NULL;
  }
  for (Py_ssize_t i = 4; i < n; i++) {
    PyObject *pointer = PyObject_CallMethodNoArgs(args[i], s_data_ptr);
    if (!pointer) return NULL;
    Py_ssize_t slot = PyLong_AsSsize_t(PyTuple_GET_ITEM(args[3], i - 4));
    void *address = PyLong_AsVoidPtr(pointer);
    Py_DECREF(pointer);
    if (PyErr_Occurred()) return NULL;
    table[slot] = address;
  }
  int code;
  Py_BEGIN_ALLOW_THREADS
  code = entry(table, (int)threads);
  Py_END_ALLOW_THREADS
  return PyLong_FromLong(code);
}

static PyMethodDef methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "launch(entry, table, threads, slots, *tensors)"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Launching compiled segments.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
  s_data_ptr = PyUnicode_InternFromString("data_ptr");
  if (!s_data_ptr) return NULL;
  return PyModule_Create(&module);
}
