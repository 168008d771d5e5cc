/* Dispatch, the base of the compiled object: tries the checks of the versions, else calls self._call(args, kwargs).
 *
 * The state of the process and the thread is read by probes, once a call; each check says what they must have answered.
 */
enum { PROBES = 24, REMEMBERED = 8 };

/* callables; (asked, told): what `told` answers where `asked` answers something true, else its answer; (dictionary, key);
 * dictionaries: whether they hold anything */
static PyObject *probes;

typedef struct {
  PyObject_HEAD
  PyObject *checks; /* the checks of the versions that have one */
  long long level1, level2, level3;
  /* The tensors of the last call that was served here: addresses, compared and never followed. They only tell the levels
   * apart, since every check is made on every level; a weak reference would keep torch from swapping the tensor. */
  struct { void *object, *data; long long version; } last[REMEMBERED];
  Py_ssize_t remembered;
  void *served;
} Dispatch;

static void dispatch_dealloc(Dispatch *self) {
  PyObject_GC_UnTrack(self);
  Py_XDECREF(self->checks);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static int dispatch_traverse(Dispatch *self, visitproc visit, void *arg) {
  Py_VISIT(self->checks);
  return 0;
}

static int dispatch_clear(Dispatch *self) {
  Py_CLEAR(self->checks);
  return 0;
}

/* The probes' values: -1 on an error. */
static int probe(PyObject **now) {
  Py_ssize_t n = PyTuple_GET_SIZE(probes);
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject *p = PyTuple_GET_ITEM(probes, i);
    if (PyDict_Check(p)) now[i] = Py_NewRef(PyDict_GET_SIZE(p) ? Py_True : Py_False);
    else if (!PyTuple_CheckExact(p)) now[i] = PyObject_CallNoArgs(p);
    else if (PyDict_Check(PyTuple_GET_ITEM(p, 0))) now[i] = Py_XNewRef(PyDict_GetItemWithError(PyTuple_GET_ITEM(p, 0), PyTuple_GET_ITEM(p, 1)));
    else if ((now[i] = PyObject_CallNoArgs(PyTuple_GET_ITEM(p, 0))) && PyObject_IsTrue(now[i]) == 1)
      Py_SETREF(now[i], PyObject_CallNoArgs(PyTuple_GET_ITEM(p, 1)));
    if (!now[i]) {
      while (i--) Py_DECREF(now[i]);
      PyErr_Clear();
      return -1;
    }
  }
  return 0;
}

static int probes_are(PyObject **now, PyObject *expected) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(expected); i++) {
    PyObject *e = PyTuple_GET_ITEM(expected, i);
    if (now[i] != e) {
      int same = same_value(now[i], e);
      if (same < 0) PyErr_Clear();
      if (same <= 0) return 0;
    }
  }
  return 1;
}

/* Whether the arguments' tensors are the objects of the last call served, unchanged; remembers them. */
static int same_as_last(Dispatch *self, Check *c, const Leaf *leaves) {
  Py_ssize_t at = 0;
  int same = self->served == c;
  for (Py_ssize_t i = 0; i < c->leaves && at < REMEMBERED; i++) {
    void *object = leaves[i].object, *data = leaves[i].data;
    long long version = kind_of(leaves[i].object) ? version_of(leaves[i].object) : 0;
    same &= at < self->remembered && self->last[at].object == object && self->last[at].data == data &&
            self->last[at].version == version && version >= 0;
    self->last[at].object = object, self->last[at].data = data, self->last[at].version = version;
    at++;
  }
  same &= at == self->remembered && at < REMEMBERED;
  self->remembered = at, self->served = c;
  return same;
}

static PyObject *dispatch_slow(Dispatch *self, PyObject *args, PyObject *kwargs) {
  PyObject *named = kwargs ? Py_NewRef(kwargs) : PyDict_New();
  if (!named) return NULL;
  PyObject *out = PyObject_CallMethodObjArgs((PyObject *)self, s_call, args, named, NULL);
  Py_DECREF(named);
  return out;
}

/* Room for n things: `small` where they fit. */
static void *room_for(void *small, size_t fits, Py_ssize_t n, size_t size) { return (size_t)n <= fits ? small : PyMem_Malloc((size_t)n * size); }

/* Tries one version: 1 served, with the result or an error in `out`; 0 not this one. */
static int try_check(Dispatch *self, Check *c, const Call *call, PyObject **out) {
  Leaf few_leaves[8], *leaves = room_for(few_leaves, 8, c->leaves, sizeof *leaves);
  PyObject *few_values[64], **v = few_values, *few_inputs[16], **inputs = few_inputs;
  int served = 0;
  if (!leaves) goto memory;
  if (!arguments_are(c, call, leaves)) goto done;
  v = room_for(few_values, 64, c->slots, sizeof *v), inputs = room_for(few_inputs, 16, c->inputs, sizeof *inputs);
  if (!v || !inputs) goto memory;
  memset(v, 0, (size_t)c->slots * sizeof *v);
  int holds = check_steps(c, call, v);
  if (holds > 0) {
    for (Py_ssize_t i = 0; i < c->inputs; i++) inputs[i] = v[c->reads[i]];
    holds = all_distinct(inputs, sizeof *inputs, c->inputs);
    if (holds < 0) PyErr_NoMemory();
  }
  served = holds != 0;
  if (holds > 0) {
    c->hits++;
    int same = same_as_last(self, c, leaves) && !call->named;
    *(same ? c->gated ? &self->level2 : &self->level1 : &self->level3) += 1;
    *out = check_run(c, call, inputs);
  }
  for (Py_ssize_t i = 0; i < c->slots; i++) Py_XDECREF(v[i]);
  goto done;
memory:
  served = 1;
  PyErr_NoMemory();
done:
  if (leaves != few_leaves) PyMem_Free(leaves);
  if (v != few_values) PyMem_Free(v);
  if (inputs != few_inputs) PyMem_Free(inputs);
  return served;
}

static PyObject *dispatch_call(Dispatch *self, PyObject *args, PyObject *kwargs) {
  PyObject *now[PROBES], *few[16], *names[16], *out = NULL;
  Py_ssize_t positional = PyTuple_GET_SIZE(args), named = kwargs ? PyDict_GET_SIZE(kwargs) : 0;
  if (!self->checks || !PyTuple_GET_SIZE(self->checks) || !probes || named > 16 || probe(now)) return dispatch_slow(self, args, kwargs);
  PyObject *checks = Py_NewRef(self->checks);
  Call call = {args, named ? kwargs : NULL, &PyTuple_GET_ITEM(args, 0), names, positional + named, named};
  int served = 0;
  if (named && !(call.given = room_for(few, 16, call.count, sizeof *few))) {
    PyErr_NoMemory();
    served = 1;
  } else if (named) {
    Py_ssize_t place = 0, at = 0;
    memcpy(call.given, &PyTuple_GET_ITEM(args, 0), (size_t)positional * sizeof *few);
    while (at < named && PyDict_Next(kwargs, &place, names + at, call.given + positional + at)) at++;
  }
  for (Py_ssize_t i = positional; i < call.count && !served; i++) Py_INCREF(call.given[i]);
  for (Py_ssize_t k = 0; !served && k < PyTuple_GET_SIZE(checks); k++) {
    Check *c = (Check *)PyTuple_GET_ITEM(checks, k);
    if (c->count >= 0 && probes_are(now, c->expected)) served = try_check(self, c, &call, &out);
  }
  if (named && call.given) {
    for (Py_ssize_t i = positional; i < call.count; i++) Py_DECREF(call.given[i]);
    if (call.given != few) PyMem_Free(call.given);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(probes); i++) Py_DECREF(now[i]);
  Py_DECREF(checks);
  return served ? out : dispatch_slow(self, args, kwargs);
}

static PyObject *dispatch_get_checks(Dispatch *self, void *closure) {
  (void)closure;
  return self->checks ? Py_NewRef(self->checks) : PyTuple_New(0);
}

static int dispatch_set_checks(Dispatch *self, PyObject *value, void *closure) {
  (void)closure;
  int right = value && PyTuple_CheckExact(value);
  for (Py_ssize_t i = 0; right && i < PyTuple_GET_SIZE(value); i++) right = Py_TYPE(PyTuple_GET_ITEM(value, i)) == &CheckType;
  if (!right) {
    PyErr_SetString(PyExc_TypeError, "checks is a tuple of Check");
    return -1;
  }
  Py_XSETREF(self->checks, Py_NewRef(value));
  return 0;
}

static PyGetSetDef dispatch_getset[] = {
    {"checks", (getter)dispatch_get_checks, (setter)dispatch_set_checks, "the checks, tried in order", NULL}, {NULL, NULL, NULL, NULL, NULL}};

static PyMemberDef dispatch_members[] = {
    {"level1", T_LONGLONG, offsetof(Dispatch, level1), 0, "calls with the tensors of the last call, unchanged"},
    {"level2", T_LONGLONG, offsetof(Dispatch, level2), 0, "the same where gates were replayed"},
    {"level3", T_LONGLONG, offsetof(Dispatch, level3), 0, "calls served after comparing the key"},
    {NULL, 0, 0, 0, NULL}};

static PyTypeObject DispatchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "tensorplay._native.Dispatch",
    .tp_doc = "Calls the version whose check holds, else self._call(args, kwargs).",
    .tp_basicsize = sizeof(Dispatch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)dispatch_dealloc,
    .tp_traverse = (traverseproc)dispatch_traverse,
    .tp_clear = (inquiry)dispatch_clear,
    .tp_call = (ternaryfunc)dispatch_call,
    .tp_getset = dispatch_getset,
    .tp_members = dispatch_members,
};

static PyObject *watch(PyObject *self, PyObject *asked) {
  (void)self;
  if (!PyTuple_CheckExact(asked) || PyTuple_GET_SIZE(asked) > PROBES) {
    PyErr_SetString(PyExc_TypeError, "watch takes a tuple of probes");
    return NULL;
  }
  Py_XSETREF(probes, Py_NewRef(asked));
  Py_RETURN_NONE;
}

/* What the probes answer now: the first argument of Check. */
static PyObject *probed(PyObject *self, PyObject *none) {
  PyObject *now[PROBES];
  (void)self, (void)none;
  if (!probes || probe(now)) Py_RETURN_NONE;
  PyObject *out = PyTuple_New(PyTuple_GET_SIZE(probes));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(probes); i++) {
    if (out) PyTuple_SET_ITEM(out, i, now[i]);
    else Py_DECREF(now[i]);
  }
  return out;
}
