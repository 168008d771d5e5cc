/* The call of a compiled function: which version serves it, and the launch, without Python in between.
 *
 * Plain CPython API and no torch header, so that one binary serves every version of torch. Optional: without it
 * everything is done in Python (key/reading.py, stax/runtime/launch.py), a call takes longer.
 *
 *   tensor.h      setup, direct, fingerprint, alike  what a tensor's metadata is
 *   launch.h      launch, Launch                from tensors to an entry
 *   seen.h        Seen                          what was found before, and whether it is still there
 *   check.h       Check                         the key of one version as a table of steps, and its program
 *   dispatch.h    watch, probed, Dispatch       the callable
 *
 * Always: what a check cannot decide it declines, and the whole key is compared in Python; a check declines what the
 * Python key would decline; the interpreter's lock is free while native code runs.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#define VERSION 7

static PyObject *s_call, *s_data_ptr, *s_forward, *s_forward_hooks, *s_forward_pre_hooks, *s_table;
static PyObject *s_parameters, *s_buffers, *s_modules, *s_getattribute, *plain_getattribute;
static int forked;

#include "tensor.h"
#include "launch.h"
#include "seen.h"
#include "check.h"
#include "dispatch.h"

static PyObject *after_fork(PyObject *self, PyObject *none) {
  (void)self, (void)none;
  forked = 1;
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, "setup(tensor, parameter, exchange, flags)"},
    {"direct", direct, METH_VARARGS, "direct(samples, functions): reads tensors without DLPack; False where it cannot."},
    {"facts", facts, METH_O, "What the direct reader reads of a tensor; None where it is off."},
    {"watch", watch, METH_O, "Sets the probes."},
    {"probed", probed, METH_NOARGS, "What the probes answer now."},
    {"fingerprint", fingerprint, METH_O, "The metadata of a tensor as bytes; None where it is no plain tensor."},
    {"alike", (PyCFunction)(void (*)(void))alike, METH_FASTCALL, "Whether each tensor of a list has the fingerprint at its place."},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "launch(entry, table, threads, slots, *tensors)"},
    {"after_fork", after_fork, METH_NOARGS, "Says that this process is a forked child: one thread from now on."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Serving calls of compiled functions.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
  static struct { PyObject **at; const char *text; } names[] = {
      {&s_call, "_call"}, {&s_data_ptr, "data_ptr"}, {&s_forward, "forward"}, {&s_forward_hooks, "_forward_hooks"},
      {&s_forward_pre_hooks, "_forward_pre_hooks"}, {&s_table, "table"},
      {&s_parameters, "_parameters"}, {&s_buffers, "_buffers"}, {&s_modules, "_modules"}, {&s_getattribute, "__getattribute__"}};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (!(*names[i].at = PyUnicode_InternFromString(names[i].text))) return NULL;
  plain_getattribute = _PyType_Lookup(&PyBaseObject_Type, s_getattribute);
  PyObject *m = PyModule_Create(&module);
  if (!m || PyModule_AddIntConstant(m, "VERSION", VERSION) || PyModule_AddType(m, &LaunchType) || PyModule_AddType(m, &CheckType) ||
      PyModule_AddType(m, &DispatchType)) {
    Py_XDECREF(m);
    return NULL;
  }
  return m;
}
