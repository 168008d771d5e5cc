/* The call of a compiled function: which version serves it, and the launch, without Python in between.
 *
 * Plain CPython API and no torch header, so that one binary serves every version of torch. Tensors are read through
 * DLPack's exchange API (a public, stable ABI) and through torch's own getters. Optional: without it everything is
 * done in Python (key/reading.py, stax/runtime/launch.py), a call takes longer.
 *
 *   setup(tensor, parameter, exchange, flags)           what of torch the rest uses
 *   watch(probes), probed()                             the state of the process and the thread
 *   fingerprint(tensor) -> bytes | None                 metadata, equal exactly where tensor entries are
 *   launch(entry, table, threads, slots, *tensors)      fills a pointer table and calls an entry
 *   Launch(...)                                         a program that is one entry: allocates, calls, returns
 *   Check(...)                                          the key of one version as a table of steps, and its program
 *   Dispatch                                            the callable: tries the checks, else calls self._call
 *
 * Always: what a check cannot decide it declines, and the whole key is compared in Python; a check declines what the
 * Python key would decline; the interpreter's lock is free while native code runs.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#define VERSION 2

/* ---- tensors through DLPack ------------------------------------------------------------------------------------- */

typedef struct { uint32_t major, minor; } DLVersion;
typedef struct { int32_t type, id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLType;
typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;
typedef struct {
  DLVersion version;
  void *previous;
  void *allocate, *from_object, *to_object;
  int (*peek)(void *, DLTensor *); /* fills in a tensor without owning it */
  void *stream;
} DLExchange;

enum { NEG, CONJ, INFERENCE, NAMED, FLAGS }; /* in the order in which setup gets them */
enum { DL_COMPLEX = 5, PROBES = 24, REMEMBERED = 8 };

static int (*peek)(void *, DLTensor *);
static PyTypeObject *tensor_type, *parameter_type;
static PyObject *flags[FLAGS]; /* methods that give a bool: is_neg, is_conj, ... */
static PyCFunction plain_flags[FLAGS];
static int flag_count;
static PyGetSetDef *get_grad, *get_version;
static PyObject *probes; /* callables, (dictionary, key) pairs, dictionaries: the state of the process and the thread */
static PyObject *s_call, *s_data_ptr, *s_forward, *s_forward_hooks, *s_forward_pre_hooks, *s_table;
static PyObject *s_parameters, *s_buffers, *s_modules;
static int forked;

typedef struct {
  uint8_t kind, grad, flags, pad;
  DLType dtype;
  DLDevice device;
  int32_t ndim;
} Head; /* a fingerprint is a head, then sizes, then strides */

/* The answer of a method of a tensor that gives a bool; -1 on an error. */
static int flag(int k, PyObject *t) {
  PyObject *set = plain_flags[k] ? plain_flags[k](t, NULL) : PyObject_CallOneArg(flags[k], t);
  Py_XDECREF(set); /* True and False live on */
  return set ? set == Py_True : -1;
}

static long long version_of(PyObject *t) {
  PyObject *v = get_version->get(t, get_version->closure);
  long long out = v ? PyLong_AsLongLong(v) : -1;
  Py_XDECREF(v);
  if (out < 0) PyErr_Clear();
  return out;
}

/* Reads a tensor's metadata; 0 where it is no plain tensor with memory of its own. The memory that `d` points into is
 * the tensor's: it is read last, since a flag may let another thread run. */
static int describe(PyObject *t, Head *h, DLTensor *d, long long *version) {
  memset(h, 0, sizeof *h);
  if (Py_TYPE(t) == tensor_type) h->kind = 1;
  else if (Py_TYPE(t) == parameter_type) h->kind = 2;
  else return 0;
  PyObject *grad = get_grad->get(t, get_grad->closure);
  if (!grad) goto no;
  h->grad = grad == Py_True;
  Py_DECREF(grad);
  *version = version_of(t); /* only inference tensors have none */
  for (int k = 0; k < flag_count; k++) {
    if (k == CONJ || (k == INFERENCE && *version >= 0)) continue;
    int set = flag(k, t);
    if (set < 0) goto no;
    h->flags |= (uint8_t)(set << k);
  }
  if (!peek || peek(t, d)) goto no;
  if (d->dtype.code == DL_COMPLEX) {
    int set = flag(CONJ, t);
    if (set < 0 || peek(t, d)) goto no;
    h->flags |= (uint8_t)(set << CONJ);
  }
  if (!d->data)
    for (int32_t i = 0;; i++) {
      if (i == d->ndim) return 0;
      if (!d->shape[i]) break;
    }
  h->dtype = d->dtype, h->device = d->device, h->ndim = d->ndim;
  return 1;
no:
  PyErr_Clear();
  return 0;
}

static int same_tensor(const Head *h, const DLTensor *d, PyObject *fingerprint) {
  const char *f = PyBytes_AS_STRING(fingerprint);
  size_t dims = sizeof(int64_t) * (size_t)h->ndim;
  return !memcmp(f, h, sizeof *h) && (!dims || (!memcmp(f + sizeof *h, d->shape, dims) && !memcmp(f + sizeof *h + dims, d->strides, dims)));
}

static PyObject *fingerprint(PyObject *self, PyObject *t) {
  Head h;
  DLTensor d;
  long long version;
  (void)self;
  if (!describe(t, &h, &d, &version)) Py_RETURN_NONE;
  size_t dims = sizeof(int64_t) * (size_t)h.ndim;
  PyObject *out = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(sizeof h + 2 * dims));
  if (!out) return NULL;
  char *f = PyBytes_AS_STRING(out);
  memcpy(f, &h, sizeof h);
  if (dims) memcpy(f + sizeof h, d.shape, dims), memcpy(f + sizeof h + dims, d.strides, dims);
  return out;
}

static void *address_of(PyObject *t) {
  DLTensor d;
  if (peek && (Py_TYPE(t) == tensor_type || Py_TYPE(t) == parameter_type)) {
    if (!peek(t, &d)) return d.data;
    PyErr_Clear();
  }
  PyObject *pointer = PyObject_CallMethodNoArgs(t, s_data_ptr);
  if (!pointer) return NULL;
  void *out = PyLong_AsVoidPtr(pointer);
  Py_DECREF(pointer);
  return out;
}

/* ---- launching -------------------------------------------------------------------------------------------------- */

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

/* ---- the check of one version ----------------------------------------------------------------------------------- */

/* Reading: v[dst] from v[src] and the object.  Comparing: v[src] with the object; dst is a second operand. */
#define OPS(X)                                                                                                          \
  X(argument) X(constant) X(item) X(attribute) X(cell) X(size) X(type) X(method) X(get) X(dict)                         \
  X(keys) X(defined) X(result)                                                                                          \
  X(is) X(same) X(held) X(equal) X(tensor) X(module) X(names) X(absent) X(identical) X(outcome)
#define ENUM(name) OP_##name,
#define NAME(name) #name,
enum { OPS(ENUM) OP_count };
static const char *const op_names[] = {OPS(NAME)};

typedef struct {
  int op;
  Py_ssize_t dst, src;
  PyObject *object; /* borrowed from `steps` */
} Step;

typedef struct {
  PyObject_HEAD
  PyObject *expected;  /* the probes' values */
  PyObject *arguments; /* for each argument: its fingerprint, (False, value) or (True, weak reference) */
  PyObject *steps;
  Step *table;
  Py_ssize_t count, slots, inputs;
  Py_ssize_t *reads;   /* slots of the inputs */
  int gated;
  PyObject *run;       /* (*inputs) -> flat outputs */
  PyObject *result;    /* an output's number, a tuple of numbers, or (flat, args, kwargs) -> result */
  int whole;           /* the result is the flat tuple itself */
  long long hits;
} Check;

static void check_dealloc(Check *self) {
  PyObject_GC_UnTrack(self);
  PyMem_Free(self->table), PyMem_Free(self->reads);
  Py_XDECREF(self->expected), Py_XDECREF(self->arguments), Py_XDECREF(self->steps);
  Py_XDECREF(self->run), Py_XDECREF(self->result);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static int check_traverse(Check *self, visitproc visit, void *arg) {
  Py_VISIT(self->expected);
  Py_VISIT(self->arguments);
  Py_VISIT(self->steps);
  Py_VISIT(self->run);
  Py_VISIT(self->result);
  return 0;
}

static int check_clear(Check *self) {
  self->count = -1; /* the steps borrow from what goes */
  Py_CLEAR(self->steps);
  Py_CLEAR(self->run);
  Py_CLEAR(self->result);
  return 0;
}

/* Check(expected, arguments, steps, slots, inputs, gated, run, result) */
static PyObject *check_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  PyObject *expected, *arguments, *steps, *inputs, *run, *result;
  Py_ssize_t slots;
  int gated;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "O!O!O!nO!pOO", &PyTuple_Type, &expected, &PyTuple_Type, &arguments, &PyTuple_Type, &steps, &slots,
                        &PyTuple_Type, &inputs, &gated, &run, &result))
    return NULL;
  Check *self = (Check *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->expected = Py_NewRef(expected), self->arguments = Py_NewRef(arguments), self->steps = Py_NewRef(steps);
  self->run = Py_NewRef(run), self->result = Py_NewRef(result);
  self->slots = slots, self->gated = gated, self->count = PyTuple_GET_SIZE(steps), self->inputs = PyTuple_GET_SIZE(inputs);
  self->table = PyMem_Calloc((size_t)self->count + 1, sizeof *self->table);
  self->reads = PyMem_Calloc((size_t)self->inputs + 1, sizeof *self->reads);
  int wrong = !self->table || !self->reads;
  for (Py_ssize_t k = 0; !wrong && k < self->count; k++) {
    Step *s = self->table + k;
    const char *name;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(steps, k), "snnO", &name, &s->dst, &s->src, &s->object)) break;
    for (s->op = 0; s->op < OP_count && strcmp(op_names[s->op], name); s->op++);
    wrong = s->op == OP_count || s->dst < -1 || s->dst >= slots || s->src < -1 || s->src >= slots;
  }
  for (Py_ssize_t k = 0; !wrong && !PyErr_Occurred() && k < self->inputs; k++) {
    self->reads[k] = PyLong_AsSsize_t(PyTuple_GET_ITEM(inputs, k));
    wrong = self->reads[k] < 0 || self->reads[k] >= slots;
  }
  if (PyTuple_Check(result)) {
    self->whole = 1;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(result); k++) {
      self->whole &= PyLong_AsSsize_t(PyTuple_GET_ITEM(result, k)) == k;
    }
  }
  if (wrong && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "Check: known steps, and slots within the table");
  if (PyErr_Occurred()) {
    Py_DECREF(self);
    return NULL;
  }
  return (PyObject *)self;
}

static PyMemberDef check_members[] = {{"hits", T_LONGLONG, offsetof(Check, hits), 0, "calls served"},
                                      {"steps", T_OBJECT, offsetof(Check, steps), READONLY, "the table of steps"},
                                      {NULL, 0, 0, 0, NULL}};

static PyTypeObject CheckType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "tensorplay._native.Check",
    .tp_doc = "The key of one version as a table of steps.",
    .tp_basicsize = sizeof(Check),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = check_new,
    .tp_dealloc = (destructor)check_dealloc,
    .tp_traverse = (traverseproc)check_traverse,
    .tp_clear = (inquiry)check_clear,
    .tp_members = check_members,
};

/* Whether two immutable values are one entry of the key: the same type, and equal to the bit. */
static int same_value(PyObject *a, PyObject *b) {
  if (a == b) return 1;
  if (Py_TYPE(a) != Py_TYPE(b)) return 0;
  if (PyFloat_CheckExact(a)) {
    double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
    return !memcmp(&x, &y, sizeof x);
  }
  return PyObject_RichCompareBool(a, b, Py_EQ);
}

static int held_is(PyObject *reference, PyObject *value) {
  PyObject *held = PyObject_CallNoArgs(reference);
  if (!held) return -1;
  Py_DECREF(held);
  return held == value && held != Py_None;
}

static int empty_dict(PyObject *owner, PyObject *name) {
  PyObject *d = PyDict_GetItemWithError(owner, name);
  return d && PyDict_Check(d) && !PyDict_GET_SIZE(d);
}

/* Whether a module's attributes, parameters, buffers and submodules have exactly these names, in order. */
static int names_are(PyObject *attributes, PyObject *names) {
  PyObject *tables[] = {attributes, PyDict_GetItemWithError(attributes, s_parameters),
                        PyDict_GetItemWithError(attributes, s_buffers), PyDict_GetItemWithError(attributes, s_modules)};
  Py_ssize_t at = 0, n = PyTuple_GET_SIZE(names);
  for (int k = 0; k < 4; k++) {
    if (!tables[k] || !PyDict_CheckExact(tables[k])) return 0;
    PyObject *key;
    Py_ssize_t place = 0;
    while (PyDict_Next(tables[k], &place, &key, NULL)) {
      if (at == n) return 0;
      PyObject *name = PyTuple_GET_ITEM(names, at++);
      if (key != name && same_value(key, name) != 1) return 0;
    }
  }
  return at == n;
}

/* Whether no two of the inputs are one object. */
static int all_distinct(Check *self, PyObject **v) {
  Py_ssize_t n = self->inputs;
  if (n <= 8) {
    for (Py_ssize_t i = 1; i < n; i++)
      for (Py_ssize_t j = 0; j < i; j++)
        if (v[self->reads[i]] == v[self->reads[j]]) return 0;
    return 1;
  }
  size_t size = 32;
  while (size < 3 * (size_t)n) size *= 2;
  PyObject **seen = PyMem_Calloc(size, sizeof *seen);
  if (!seen) return -1;
  int out = 1;
  for (Py_ssize_t i = 0; out && i < n; i++) {
    PyObject *x = v[self->reads[i]];
    size_t at = ((uintptr_t)x >> 4) * 0x9E3779B97F4A7C15ull >> 20 & (size - 1);
    for (; seen[at] && seen[at] != x; at = (at + 1) & (size - 1));
    out = seen[at] != x;
    seen[at] = x;
  }
  PyMem_Free(seen);
  return out;
}

static PyObject *inputs_of(Check *self, PyObject **v) {
  PyObject *out = PyTuple_New(self->inputs);
  for (Py_ssize_t i = 0; out && i < self->inputs; i++) PyTuple_SET_ITEM(out, i, Py_NewRef(v[self->reads[i]]));
  return out;
}

/* Runs the steps on a call; 1: the call has this key, 0: it has not, -1: an error that is no Exception. */
static int check_steps(Check *self, PyObject *args, PyObject **v, int *called) {
  Head h;
  DLTensor d;
  long long version;
  for (Py_ssize_t k = 0; k < self->count; k++) {
    const Step *s = self->table + k;
    PyObject *from = s->src >= 0 ? v[s->src] : NULL, *made = NULL, *o = s->object;
    int holds = 1;
    switch (s->op) {
      case OP_argument: made = Py_XNewRef(PyTuple_GET_ITEM(args, PyLong_AsSsize_t(o))); break;
      case OP_constant: made = Py_NewRef(o); break;
      case OP_item:
        if (PyDict_CheckExact(from)) made = Py_XNewRef(PyDict_GetItemWithError(from, o));
        else made = PyObject_GetItem(from, o), *called = 1;
        break;
      case OP_attribute:
        made = PyObject_GetAttr(from, o);
        *called |= !PyFunction_Check(from); /* others may have a __getattr__ */
        break;
      case OP_cell: made = PyCell_Get(o); break;
      case OP_size: {
        Py_ssize_t n = PyObject_Size(from);
        made = n < 0 ? NULL : PyLong_FromSsize_t(n);
        break;
      }
      case OP_type: made = Py_NewRef((PyObject *)Py_TYPE(from)); break;
      case OP_method: made = PyObject_CallMethodNoArgs(from, o), *called = 1; break;
      case OP_get: made = PyObject_CallFunctionObjArgs(o, args, NULL), *called = 1; break;
      case OP_dict: made = PyObject_GenericGetDict(from, NULL); break;
      case OP_keys: made = PySequence_Tuple(from); break;
      case OP_defined: {
        int found = PyDict_CheckExact(from) ? PyDict_Contains(from, o) : -1;
        made = found < 0 ? NULL : Py_NewRef(found ? Py_True : Py_False);
        break;
      }
      case OP_result: made = PyObject_CallNoArgs(from), *called = 1; break;
      case OP_is: holds = from == o; break;
      case OP_same: holds = same_value(from, o); break;
      case OP_held: holds = held_is(o, from); break;
      case OP_equal: { /* (entry_of, expected) */
        PyObject *now = PyObject_CallOneArg(PyTuple_GET_ITEM(o, 0), from);
        *called = 1;
        holds = now ? PyObject_RichCompareBool(now, PyTuple_GET_ITEM(o, 1), Py_EQ) : -1;
        Py_XDECREF(now);
        break;
      }
      case OP_tensor: holds = describe(from, &h, &d, &version) && same_tensor(&h, &d, o); break;
      case OP_module: /* dst: its attributes */
        holds = (PyObject *)Py_TYPE(from) == o && empty_dict(v[s->dst], s_forward_hooks) &&
                empty_dict(v[s->dst], s_forward_pre_hooks) && !PyDict_GetItemWithError(v[s->dst], s_forward);
        break;
      case OP_absent: holds = !PyDict_GetItemWithError(v[s->dst], o); break; /* dst: the attributes of a module */
      case OP_names: holds = names_are(v[s->dst], o); break; /* dst: the attributes of a module */
      case OP_identical: holds = from == v[s->dst]; break;
      case OP_outcome: { /* (inputs -> outcome, expected) */
        PyObject *inputs = inputs_of(self, v), *now = inputs ? PyObject_CallOneArg(PyTuple_GET_ITEM(o, 0), inputs) : NULL;
        *called = 1;
        holds = now ? PyObject_RichCompareBool(now, PyTuple_GET_ITEM(o, 1), Py_EQ) : -1;
        Py_XDECREF(inputs), Py_XDECREF(now);
        break;
      }
    }
    if (s->op < OP_is) {
      if (!made) holds = 0;
      else if (v[s->dst]) Py_SETREF(v[s->dst], made);
      else v[s->dst] = made;
    }
    if (PyErr_Occurred()) { /* a value that can no longer be read is a difference */
      if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
      PyErr_Clear();
      holds = 0;
    }
    if (holds <= 0) return 0;
  }
  int distinct = all_distinct(self, v);
  if (distinct < 0) PyErr_NoMemory();
  return distinct;
}

/* Runs the version's program on its inputs and makes the caller's result. */
static PyObject *check_run(Check *self, PyObject *args, PyObject **v) {
  PyObject *small[16], **inputs = small, *flat, *out = NULL;
  if (self->inputs > 16 && !(inputs = PyMem_Malloc((size_t)self->inputs * sizeof *inputs))) return PyErr_NoMemory();
  for (Py_ssize_t i = 0; i < self->inputs; i++) inputs[i] = v[self->reads[i]];
  PyObject *run = Py_NewRef(self->run), *result = Py_NewRef(self->result);
  if (Py_TYPE(run) == &LaunchType) flat = launch_run((Launch *)run, inputs, self->inputs);
  else flat = PyObject_Vectorcall(run, inputs, (size_t)self->inputs, NULL);
  if (inputs != small) PyMem_Free(inputs);
  if (!flat) goto done;
  int tuple = PyTuple_CheckExact(flat);
  if (tuple && PyLong_CheckExact(result)) {
    Py_ssize_t k = PyLong_AsSsize_t(result);
    if (k < PyTuple_GET_SIZE(flat)) out = Py_NewRef(PyTuple_GET_ITEM(flat, k));
    else PyErr_SetString(PyExc_IndexError, "the program has too few outputs");
  } else if (tuple && self->whole && PyTuple_GET_SIZE(flat) == PyTuple_GET_SIZE(result)) {
    out = Py_NewRef(flat);
  } else if (PyLong_CheckExact(result)) {
    out = PyObject_GetItem(flat, result);
  } else if (PyTuple_CheckExact(result)) {
    out = PyTuple_New(PyTuple_GET_SIZE(result));
    for (Py_ssize_t i = 0; out && i < PyTuple_GET_SIZE(result); i++) {
      PyObject *item = PyObject_GetItem(flat, PyTuple_GET_ITEM(result, i));
      if (item) PyTuple_SET_ITEM(out, i, item);
      else Py_CLEAR(out);
    }
  } else {
    PyObject *none = PyDict_New();
    if (none) out = PyObject_CallFunctionObjArgs(result, flat, args, none, NULL);
    Py_XDECREF(none);
  }
  Py_DECREF(flat);
done:
  Py_DECREF(run), Py_DECREF(result);
  return out;
}

/* ---- dispatch --------------------------------------------------------------------------------------------------- */

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

typedef struct {
  int tensor; /* 1: described, 0: not a plain tensor */
  Head head;
  DLTensor data;
  long long version;
} View;

static void look(View *views, PyObject *args) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
    views[i].tensor = describe(PyTuple_GET_ITEM(args, i), &views[i].head, &views[i].data, &views[i].version);
}

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
    else if (PyTuple_CheckExact(p)) now[i] = Py_XNewRef(PyDict_GetItemWithError(PyTuple_GET_ITEM(p, 0), PyTuple_GET_ITEM(p, 1)));
    else now[i] = PyObject_CallNoArgs(p);
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

static int arguments_are(Check *c, PyObject *args, const View *views) {
  Py_ssize_t n = PyTuple_GET_SIZE(args);
  if (PyTuple_GET_SIZE(c->arguments) != n) return 0;
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject *e = PyTuple_GET_ITEM(c->arguments, i), *x = PyTuple_GET_ITEM(args, i);
    int holds;
    if (PyBytes_CheckExact(e)) {
      holds = views[i].tensor && same_tensor(&views[i].head, &views[i].data, e);
      for (Py_ssize_t j = 0; holds && j < i; j++) holds = PyTuple_GET_ITEM(args, j) != x;
    } else {
      PyObject *value = PyTuple_GET_ITEM(e, 1);
      holds = PyTuple_GET_ITEM(e, 0) == Py_True ? held_is(value, x) : same_value(x, value);
      if (holds < 0) PyErr_Clear();
    }
    if (holds <= 0) return 0;
  }
  return 1;
}

/* Whether the arguments' tensors are the objects of the last call served, unchanged; remembers them. */
static int same_as_last(Dispatch *self, Check *c, PyObject *args, const View *views) {
  Py_ssize_t at = 0;
  int same = self->served == c;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args) && at < REMEMBERED; i++) {
    if (!views[i].tensor) continue;
    void *object = PyTuple_GET_ITEM(args, i), *data = views[i].data.data;
    long long version = views[i].version;
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

static PyObject *dispatch_call(Dispatch *self, PyObject *args, PyObject *kwargs) {
  if (!self->checks || !probes || (kwargs && PyDict_GET_SIZE(kwargs))) return dispatch_slow(self, args, kwargs);
  PyObject *now[PROBES], *checks = Py_NewRef(self->checks), *out = NULL;
  Py_ssize_t n = PyTuple_GET_SIZE(args), versions = PyTuple_GET_SIZE(checks);
  View small[4], *views = small;
  PyObject *few[64], **v = few;
  Py_ssize_t room = 64;
  int served = 0, stale = 1;
  if (!versions || probe(now)) {
    Py_DECREF(checks);
    return dispatch_slow(self, args, kwargs);
  }
  if (n > 4 && !(views = PyMem_Malloc((size_t)n * sizeof *views))) goto memory;
  for (Py_ssize_t k = 0; !served && k < versions; k++) {
    Check *c = (Check *)PyTuple_GET_ITEM(checks, k);
    if (c->count < 0 || !probes_are(now, c->expected)) continue;
    if (stale) look(views, args);
    stale = 0;
    if (!arguments_are(c, args, views)) continue;
    if (c->slots > room) {
      if (v != few) PyMem_Free(v);
      room = c->slots;
      if (!(v = PyMem_Malloc((size_t)room * sizeof *v))) {
        v = few;
        goto memory;
      }
    }
    memset(v, 0, (size_t)c->slots * sizeof *v);
    int holds = check_steps(c, args, v, &stale);
    if (holds > 0) {
      served = 1;
      c->hits++;
      if (stale) look(views, args); /* what the steps called may have changed what the views point into */
      int same = same_as_last(self, c, args, views);
      *(same ? c->gated ? &self->level2 : &self->level1 : &self->level3) += 1;
      out = check_run(c, args, v);
    } else if (holds < 0) {
      served = 1;
    }
    for (Py_ssize_t i = 0; i < c->slots; i++) Py_XDECREF(v[i]);
  }
  goto done;
memory:
  served = 1;
  PyErr_NoMemory();
done:
  if (views != small) PyMem_Free(views);
  if (v != few) PyMem_Free(v);
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

/* ---- the module ------------------------------------------------------------------------------------------------- */

static PyObject *find(PyTypeObject *type, const char *name, PyTypeObject *kind) {
  for (Py_ssize_t i = 0; type->tp_mro && i < PyTuple_GET_SIZE(type->tp_mro); i++) {
    PyObject *base = PyTuple_GET_ITEM(type->tp_mro, i), *space = PyObject_GetAttrString(base, "__dict__"), *key, *found = NULL;
    key = PyUnicode_FromString(name);
    if (space && key) found = PyObject_GetItem(space, key);
    Py_XDECREF(space), Py_XDECREF(key);
    PyErr_Clear();
    Py_XDECREF(found); /* the class keeps it */
    if (found && Py_TYPE(found) == kind) return found;
  }
  PyErr_Format(PyExc_AttributeError, "%s has no %s", type->tp_name, name);
  return NULL;
}

static PyObject *setup(PyObject *self, PyObject *args) {
  PyObject *tensor, *parameter, *exchange, *names, *found;
  (void)self;
  if (!PyArg_ParseTuple(args, "O!O!OO!", &PyType_Type, &tensor, &PyType_Type, &parameter, &exchange, &PyTuple_Type, &names))
    return NULL;
  DLExchange *api = PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
  if (!api) return NULL;
  if (api->version.major != 1 || !api->peek || PyTuple_GET_SIZE(names) > FLAGS) {
    PyErr_SetString(PyExc_RuntimeError, "the tensors of this torch cannot be read");
    return NULL;
  }
  if (!(found = find((PyTypeObject *)tensor, "requires_grad", &PyGetSetDescr_Type))) return NULL;
  get_grad = ((PyGetSetDescrObject *)found)->d_getset;
  if (!(found = find((PyTypeObject *)tensor, "_version", &PyGetSetDescr_Type))) return NULL;
  get_version = ((PyGetSetDescrObject *)found)->d_getset;
  for (flag_count = 0; flag_count < PyTuple_GET_SIZE(names); flag_count++) {
    const char *name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(names, flag_count));
    if (!name || !(found = find((PyTypeObject *)tensor, name, &PyMethodDescr_Type))) return NULL;
    PyMethodDef *method = ((PyMethodDescrObject *)found)->d_method;
    plain_flags[flag_count] = method->ml_flags == METH_NOARGS ? method->ml_meth : NULL;
    Py_XSETREF(flags[flag_count], Py_NewRef(found));
  }
  Py_XSETREF(tensor_type, (PyTypeObject *)Py_NewRef(tensor));
  Py_XSETREF(parameter_type, (PyTypeObject *)Py_NewRef(parameter));
  peek = api->peek;
  Py_RETURN_NONE;
}

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

static PyObject *after_fork(PyObject *self, PyObject *none) {
  (void)self, (void)none;
  forked = 1;
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, "setup(tensor, parameter, exchange, flags)"},
    {"watch", watch, METH_O, "Sets the probes: callables, (dictionary, key) pairs, dictionaries."},
    {"probed", probed, METH_NOARGS, "What the probes answer now."},
    {"fingerprint", fingerprint, METH_O, "The metadata of a tensor as bytes; None where it is no plain tensor."},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "launch(entry, table, threads, slots, *tensors)"},
    {"after_fork", after_fork, METH_NOARGS, "Says that this process is a forked child: one thread from now on."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Serving calls of compiled functions.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
  static struct { PyObject **at; const char *text; } names[] = {
      {&s_call, "_call"}, {&s_data_ptr, "data_ptr"}, {&s_forward, "forward"}, {&s_forward_hooks, "_forward_hooks"},
      {&s_forward_pre_hooks, "_forward_pre_hooks"}, {&s_table, "table"},
      {&s_parameters, "_parameters"}, {&s_buffers, "_buffers"}, {&s_modules, "_modules"}};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (!(*names[i].at = PyUnicode_InternFromString(names[i].text))) return NULL;
  PyObject *m = PyModule_Create(&module);
  if (!m || PyModule_AddIntConstant(m, "VERSION", VERSION) || PyModule_AddType(m, &LaunchType) || PyModule_AddType(m, &CheckType) ||
      PyModule_AddType(m, &DispatchType)) {
    Py_XDECREF(m);
    return NULL;
  }
  return m;
}
