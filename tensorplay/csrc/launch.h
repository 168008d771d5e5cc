/* From Python into native code: pointers of tensors into a table, and the table to an entry.
 *
 *   launch(entry, table, threads, slots, *tensors)   fills a pointer table and calls an entry
 *   Launch(...)                                      a program that is one entry: allocates, calls, returns
 *
 * Always: the interpreter's lock is free while native code runs.
 */
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
    Py_ssize_t slot = PyLong_AsSsize_t(PyTuple_GET_ITEM(args[3], i - 4));
    void *address = address_of(args[i]);
    if (PyErr_Occurred()) return NULL;
    table[slot] = address;
  }
  int code;
  Py_BEGIN_ALLOW_THREADS
  code = entry(table, (int)threads);
  Py_END_ALLOW_THREADS
  return PyLong_FromLong(code);
}

typedef struct {
  PyObject_HEAD
  Entry entry;
  Py_ssize_t slots, inputs, outputs;
  void **table;        /* null but for constants */
  Py_ssize_t *places;  /* slots of the inputs (-1: not read), then of the outputs */
  PyObject *keep;      /* what the table points to, and the code */
  PyObject *layouts;   /* (size, stride, dtype) of each output */
  PyObject *empty;     /* (size, stride, dtype) -> tensor */
  PyObject *threads, *take, *give; /* take and give lease memory for intermediates; None where there are none */
  PyObject *failed;    /* (code, inputs) -> result, where a run-time check failed */
} Launch;

static void launch_dealloc(Launch *self) {
  PyObject_GC_UnTrack(self);
  PyMem_Free(self->table), PyMem_Free(self->places);
  Py_XDECREF(self->keep), Py_XDECREF(self->layouts), Py_XDECREF(self->empty), Py_XDECREF(self->threads);
  Py_XDECREF(self->take), Py_XDECREF(self->give), Py_XDECREF(self->failed);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static int launch_traverse(Launch *self, visitproc visit, void *arg) {
  Py_VISIT(self->keep);
  Py_VISIT(self->layouts);
  Py_VISIT(self->empty);
  Py_VISIT(self->threads);
  Py_VISIT(self->take);
  Py_VISIT(self->give);
  Py_VISIT(self->failed);
  return 0;
}

static int launch_clear(Launch *self) {
  Py_CLEAR(self->keep);
  Py_CLEAR(self->take);
  Py_CLEAR(self->give);
  Py_CLEAR(self->failed);
  return 0;
}

/* Launch(entry, slots, constants, inputs, outputs, layouts, keep, empty, threads, take, give, failed) */
static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  PyObject *entry, *constants, *inputs, *outputs, *layouts, *keep, *empty, *threads, *take, *give, *failed;
  Py_ssize_t slots;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "OnO!O!O!O!OOOOOO", &entry, &slots, &PyTuple_Type, &constants, &PyTuple_Type, &inputs, &PyTuple_Type,
                        &outputs, &PyTuple_Type, &layouts, &keep, &empty, &threads, &take, &give, &failed))
    return NULL;
  Launch *self = (Launch *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->entry = (Entry)PyLong_AsVoidPtr(entry);
  self->slots = slots, self->inputs = PyTuple_GET_SIZE(inputs), self->outputs = PyTuple_GET_SIZE(outputs);
  self->table = PyMem_Calloc((size_t)slots + 1, sizeof *self->table);
  self->places = PyMem_Calloc((size_t)(self->inputs + self->outputs) + 1, sizeof *self->places);
  self->keep = Py_NewRef(keep), self->layouts = Py_NewRef(layouts), self->empty = Py_NewRef(empty);
  self->threads = Py_NewRef(threads), self->failed = Py_NewRef(failed);
  self->take = take == Py_None ? NULL : Py_NewRef(take), self->give = Py_NewRef(give);
  int wrong = !self->entry || !self->table || !self->places || PyTuple_GET_SIZE(layouts) != self->outputs;
  for (Py_ssize_t i = 0; !wrong && i < PyTuple_GET_SIZE(constants); i++) {
    Py_ssize_t slot;
    PyObject *pointer;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(constants, i), "nO", &slot, &pointer)) break;
    wrong = slot < 0 || slot >= slots;
    if (!wrong) self->table[slot] = PyLong_AsVoidPtr(pointer);
  }
  for (Py_ssize_t i = 0; !wrong && i < self->inputs + self->outputs; i++) {
    PyObject *at = i < self->inputs ? PyTuple_GET_ITEM(inputs, i) : PyTuple_GET_ITEM(outputs, i - self->inputs);
    self->places[i] = PyLong_AsSsize_t(at);
    wrong = self->places[i] < (i < self->inputs ? -1 : 0) || self->places[i] >= slots;
  }
  if (wrong && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "Launch: an entry, and slots within the table");
  if (PyErr_Occurred()) {
    Py_DECREF(self);
    return NULL;
  }
  return (PyObject *)self;
}

/* Runs the program: the flat outputs as a tuple. */
static PyObject *launch_run(Launch *self, PyObject *const *inputs, Py_ssize_t n) {
  if (n != self->inputs) return PyErr_Format(PyExc_TypeError, "this program takes %zd inputs, not %zd", self->inputs, n);
  void *small[64], **own = NULL, **table = small;
  PyObject *lease = NULL, *out = PyTuple_New(self->outputs);
  if (!out) return NULL;
  if (self->take) {
    if (!(lease = PyObject_CallNoArgs(self->take))) goto fail;
    PyObject *address = PyObject_GetAttr(lease, s_table);
    if (!address) goto fail;
    table = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    if (!table) goto fail;
  } else {
    if (self->slots > 64 && !(table = own = PyMem_Malloc((size_t)self->slots * sizeof *own))) {
      PyErr_NoMemory();
      goto fail;
    }
    memcpy(table, self->table, (size_t)self->slots * sizeof *table);
  }
  for (Py_ssize_t i = 0; i < self->outputs; i++) {
    PyObject *layout = PyTuple_GET_ITEM(self->layouts, i);
    PyObject *t = PyObject_Vectorcall(self->empty, &PyTuple_GET_ITEM(layout, 0), (size_t)PyTuple_GET_SIZE(layout), NULL);
    if (!t) goto fail;
    PyTuple_SET_ITEM(out, i, t);
    table[self->places[self->inputs + i]] = address_of(t);
  }
  for (Py_ssize_t i = 0; i < self->inputs; i++)
    if (self->places[i] >= 0) table[self->places[i]] = address_of(inputs[i]);
  if (PyErr_Occurred()) goto fail;
  int threads = 1, code;
  if (!forked) {
    PyObject *count = PyObject_CallNoArgs(self->threads);
    if (!count) goto fail;
    threads = (int)PyLong_AsLong(count);
    Py_DECREF(count);
  }
  Py_BEGIN_ALLOW_THREADS
  code = self->entry(table, threads);
  Py_END_ALLOW_THREADS
  if (code) {
    Py_CLEAR(out);
    PyObject *given = PyTuple_New(n);
    for (Py_ssize_t i = 0; given && i < n; i++) PyTuple_SET_ITEM(given, i, Py_NewRef(inputs[i]));
    if (given) out = PyObject_CallFunction(self->failed, "iN", code, given);
  } else if (lease) {
    PyObject *none = PyObject_CallOneArg(self->give, lease);
    if (!none) goto fail;
    Py_DECREF(none);
  }
  PyMem_Free(own);
  Py_XDECREF(lease);
  return out;
fail:
  PyMem_Free(own);
  Py_XDECREF(lease);
  Py_XDECREF(out);
  return NULL;
}

static PyObject *launch_call(Launch *self, PyObject *args, PyObject *kwargs) {
  if (kwargs && PyDict_GET_SIZE(kwargs)) {
    PyErr_SetString(PyExc_TypeError, "a program takes no keyword arguments");
    return NULL;
  }
  return launch_run(self, &PyTuple_GET_ITEM(args, 0), PyTuple_GET_SIZE(args));
}

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "tensorplay._native.Launch",
    .tp_doc = "A program that is one native entry.",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = launch_new,
    .tp_dealloc = (destructor)launch_dealloc,
    .tp_traverse = (traverseproc)launch_traverse,
    .tp_clear = (inquiry)launch_clear,
    .tp_call = (ternaryfunc)launch_call,
};
