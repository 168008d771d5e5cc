/* Tensors as the key sees them: metadata as a fingerprint, and whether a tensor still has one.
 *
 * Two readers. The exchange reader uses DLPack's exchange API (a public, stable ABI) and torch's own getters. The direct
 * reader, four times as fast, follows the pointer to the TensorImpl that a tensor object holds and asks the functions
 * of torch's stable ABI for the rest. Where that pointer and the dispatch keys stand is not guessed but found: `direct`
 * looks for values that Python says, in samples that differ in all of them (native.py compares the other facts).
 *
 * Always: two tensors have the same fingerprint exactly where their entries in the Python key are equal.
 */
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
enum { DL_CPU = 1, DL_COMPLEX = 5 };

static int (*peek)(void *, DLTensor *);
static PyTypeObject *tensor_type, *parameter_type;
static PyObject *flags[FLAGS]; /* methods that give a bool: is_neg, is_conj, ... */
static PyCFunction plain_flags[FLAGS];
static int flag_count;
static PyGetSetDef *get_grad, *get_version;

/* Functions of torch's stable ABI; a handle is the address of a pointer to a TensorImpl. They return 0 or an error. */
static struct {
  int32_t (*dim)(void *, int64_t *), (*sizes)(void *, int64_t **), (*strides)(void *, int64_t **);
  int32_t (*dtype)(void *, int32_t *), (*device_type)(void *, int32_t *), (*device_index)(void *, int32_t *);
  int32_t (*data)(void *, void **);
  uint8_t (*requires_grad)(const void *); /* of the TensorImpl itself; null: the getter of Python is asked */
} abi;
static int direct_on;
static Py_ssize_t impl_at; /* in a tensor object */
static size_t keys_at;     /* in a TensorImpl */
static int32_t cpu;        /* the CPU among the types of devices */

typedef struct {
  uint8_t kind, grad, flags, pad; /* flags: of the exchange reader, which has no dispatch keys */
  int32_t dtype, device, index, ndim, pad2;
  uint64_t keys;
} Head; /* a fingerprint is a head, then sizes, then strides */

typedef struct {
  Head head;
  const int64_t *sizes, *strides; /* the tensor's own memory, gone when it changes */
  void *data;
} Facts;

static uint8_t kind_of(PyObject *t) { return Py_TYPE(t) == tensor_type ? 1 : Py_TYPE(t) == parameter_type ? 2 : 0; }

/* The answer of a method of a tensor that gives a bool; -1 on an error. */
static int flag(int k, PyObject *t) {
  PyObject *set = plain_flags[k] ? plain_flags[k](t, NULL) : PyObject_CallOneArg(flags[k], t);
  Py_XDECREF(set); /* True and False live on */
  return set ? set == Py_True : -1;
}

/* The version counter; -1 where there is none (inference tensors). */
static long long version_of(PyObject *t) {
  PyObject *v = get_version->get(t, get_version->closure);
  long long out = v ? PyLong_AsLongLong(v) : -1;
  Py_XDECREF(v);
  if (out < 0) PyErr_Clear();
  return out;
}

static int requires_grad(PyObject *t, void *impl) {
  if (impl && abi.requires_grad) return abi.requires_grad(impl) != 0;
  PyObject *grad = get_grad->get(t, get_grad->closure);
  Py_XDECREF(grad);
  return grad ? grad == Py_True : -1;
}

static int no_memory(const Facts *f) {
  if (f->data) return 0;
  for (int32_t i = 0; i < f->head.ndim; i++)
    if (!f->sizes[i]) return 0;
  return 1;
}

/* Reads a tensor's metadata; 0 where it is no plain tensor with memory of its own. DLPack is asked last, since a flag
 * may let another thread run. */
static int read_exchange(PyObject *t, Facts *f) {
  DLTensor d;
  Head *h = &f->head;
  memset(h, 0, sizeof *h);
  if (!(h->kind = kind_of(t))) return 0;
  int grad = requires_grad(t, NULL);
  if (grad < 0) goto no;
  h->grad = (uint8_t)grad;
  for (int k = 0; k < flag_count; k++) {
    if (k == CONJ) continue;
    int set = flag(k, t);
    if (set < 0) goto no;
    h->flags |= (uint8_t)(set << k);
  }
  if (!peek || peek(t, &d)) goto no;
  if (d.dtype.code == DL_COMPLEX) {
    int set = flag(CONJ, t);
    if (set < 0 || peek(t, &d)) goto no;
    h->flags |= (uint8_t)(set << CONJ);
  }
  memcpy(&h->dtype, &d.dtype, sizeof h->dtype);
  h->device = d.device.type, h->index = d.device.id, h->ndim = d.ndim;
  f->sizes = d.shape, f->strides = d.strides, f->data = d.data;
  return !no_memory(f);
no:
  PyErr_Clear();
  return 0;
}

static void *impl_of(PyObject *t) { return *(void **)((char *)t + impl_at); }
static uint64_t keys_of(void *impl) {
  uint64_t keys;
  memcpy(&keys, (char *)impl + keys_at, sizeof keys);
  return keys;
}

/* The facts of a tensor whose dispatch keys are those of a plain one, so that no function of the ABI fails. */
static int read_direct(PyObject *t, void *impl, Facts *f) {
  Head *h = &f->head;
  int64_t ndim, *sizes, *strides;
  memset(h, 0, sizeof *h);
  h->kind = kind_of(t), h->keys = keys_of(impl);
  int grad = requires_grad(t, impl);
  if (grad < 0) PyErr_Clear();
  if (grad < 0 || abi.dim(&impl, &ndim) || abi.sizes(&impl, &sizes) || abi.strides(&impl, &strides)) return 0;
  if (abi.dtype(&impl, &h->dtype) || abi.data(&impl, &f->data)) return 0;
  h->grad = (uint8_t)grad, h->ndim = (int32_t)ndim, f->sizes = sizes, f->strides = strides;
  return !no_memory(f);
}

static int device_of(void *impl, Head *h) { return !abi.device_type(&impl, &h->device) && !abi.device_index(&impl, &h->index); }

static PyObject *fingerprint(PyObject *self, PyObject *t) {
  Facts f;
  (void)self;
  if (!read_exchange(t, &f)) Py_RETURN_NONE; /* decides that it is a plain tensor */
  if (direct_on && !(read_direct(t, impl_of(t), &f) && device_of(impl_of(t), &f.head))) Py_RETURN_NONE;
  size_t dims = sizeof(int64_t) * (size_t)f.head.ndim;
  PyObject *out = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(sizeof f.head + 2 * dims));
  if (!out) return NULL;
  char *at = PyBytes_AS_STRING(out);
  memcpy(at, &f.head, sizeof f.head);
  if (dims) memcpy(at + sizeof f.head, f.sizes, dims), memcpy(at + sizeof f.head + dims, f.strides, dims);
  return out;
}

/* Whether a tensor still has a fingerprint, and where its data is then. */
static int matches(PyObject *t, PyObject *fingerprint, void **data) {
  const char *at = PyBytes_AS_STRING(fingerprint);
  const Head *e = (const Head *)at;
  Facts f;
  if (kind_of(t) != e->kind) return 0;
  if (direct_on) {
    void *impl = impl_of(t);
    if (!impl || keys_of(impl) != e->keys || !read_direct(t, impl, &f)) return 0;
    if (e->device == cpu) f.head.device = e->device, f.head.index = e->index; /* the keys name it */
    else if (!device_of(impl, &f.head)) return 0;
  } else if (!read_exchange(t, &f)) {
    return 0;
  }
  *data = f.data;
  size_t dims = sizeof(int64_t) * (size_t)f.head.ndim;
  if (memcmp(e, &f.head, sizeof f.head)) return 0;
  return !dims || (!memcmp(at + sizeof f.head, f.sizes, dims) && !memcmp(at + sizeof f.head + dims, f.strides, dims));
}

/* alike(tensors, fingerprints): whether each tensor still has its fingerprint. */
static PyObject *alike(PyObject *self, PyObject *const *args, Py_ssize_t n) {
  (void)self;
  if (n != 2 || !(PyList_Check(args[0]) || PyTuple_Check(args[0])) || !PyTuple_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "alike(list or tuple of tensors, tuple of fingerprints)");
    return NULL;
  }
  Py_ssize_t count = PyTuple_GET_SIZE(args[1]);
  for (Py_ssize_t i = 0; i < count; i++) {
    void *data;
    PyObject *print = PyTuple_GET_ITEM(args[1], i), *t = NULL;
    int same = PySequence_Fast_GET_SIZE(args[0]) == count && PyBytes_CheckExact(print) && PyBytes_GET_SIZE(print) >= (Py_ssize_t)sizeof(Head);
    if (same) t = Py_NewRef(PySequence_Fast_GET_ITEM(args[0], i)); /* reading one may let another thread run */
    same = same && matches(t, print, &data);
    Py_XDECREF(t);
    if (!same) Py_RETURN_FALSE;
  }
  return PyBool_FromLong(PySequence_Fast_GET_SIZE(args[0]) == count);
}

/* Where a tensor's data is; an error is set where that cannot be said. */
static void *address_of(PyObject *t) {
  DLTensor d;
  void *out;
  if (kind_of(t)) {
    void *impl = direct_on ? impl_of(t) : NULL;
    if (impl && !abi.data(&impl, &out)) return out;
    if (peek && !peek(t, &d)) return d.data;
    PyErr_Clear();
  }
  PyObject *pointer = PyObject_CallMethodNoArgs(t, s_data_ptr);
  if (!pointer) return NULL;
  out = PyLong_AsVoidPtr(pointer);
  Py_DECREF(pointer);
  return out;
}

/* ---- setting up --------------------------------------------------------------------------------------------------- */

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

/* setup(tensor, parameter, exchange, flags): the classes, DLPack's exchange API, the names of the methods that ask a flag */
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

/* The first offset below `end` at which every sample's memory holds its own word; -1 where there is none. */
static Py_ssize_t place_of(PyObject *samples, int word, Py_ssize_t begin, Py_ssize_t end) {
  for (Py_ssize_t at = begin; at + (Py_ssize_t)sizeof(uint64_t) <= end; at += (Py_ssize_t)sizeof(void *)) {
    Py_ssize_t i = 0, n = PyTuple_GET_SIZE(samples);
    for (; i < n; i++) {
      PyObject *row = PyTuple_GET_ITEM(samples, i);
      uint64_t expected = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(row, word)), found;
      char *memory = word == 1 ? (char *)PyTuple_GET_ITEM(row, 0) : impl_of(PyTuple_GET_ITEM(row, 0));
      memcpy(&found, memory + at, sizeof found);
      if (found != expected) break;
    }
    if (i == n) return at;
  }
  return -1;
}

/* direct(samples, functions): turns the direct reader on. Samples: (tensor, address of its TensorImpl, dispatch keys);
 * functions: addresses, in the order of `abi`. Gives False, and leaves it off, where something is not found. */
static PyObject *direct(PyObject *self, PyObject *args) {
  PyObject *samples, *functions;
  (void)self;
  direct_on = 0;
  if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &samples, &PyTuple_Type, &functions)) return NULL;
  void **slots = (void **)&abi;
  Py_ssize_t n = PyTuple_GET_SIZE(functions);
  if (n * sizeof(void *) != sizeof abi || sizeof(void *) != sizeof(uint64_t) || !PyTuple_GET_SIZE(samples)) Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < n; i++) slots[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(functions, i));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(samples); i++) {
    PyObject *row = PyTuple_GET_ITEM(samples, i);
    if (!PyTuple_CheckExact(row) || PyTuple_GET_SIZE(row) != 3 || !kind_of(PyTuple_GET_ITEM(row, 0))) Py_RETURN_FALSE;
  }
  if (PyErr_Occurred()) return NULL;
  impl_at = place_of(samples, 1, sizeof(PyObject), tensor_type->tp_base->tp_basicsize);
  if (impl_at < 0) Py_RETURN_FALSE;
  Py_ssize_t keys = place_of(samples, 2, 0, 184); /* its keys are the last word of a TensorImpl, at 168 or, where it has names, 176 */
  if (keys < 0) Py_RETURN_FALSE;
  keys_at = (size_t)keys;
  void *impl = impl_of(PyTuple_GET_ITEM(PyTuple_GET_ITEM(samples, 0), 0));
  direct_on = !abi.device_type(&impl, &cpu);
  return PyBool_FromLong(direct_on);
}

/* facts(tensor): what the direct reader reads, for comparison with what Python says. */
static PyObject *facts(PyObject *self, PyObject *t) {
  Facts f;
  (void)self;
  if (!direct_on || !kind_of(t) || !read_direct(t, impl_of(t), &f) || !device_of(impl_of(t), &f.head)) Py_RETURN_NONE;
  PyObject *sizes = PyTuple_New(f.head.ndim), *strides = PyTuple_New(f.head.ndim);
  for (int32_t i = 0; sizes && strides && i < f.head.ndim; i++) {
    PyTuple_SET_ITEM(sizes, i, PyLong_FromLongLong(f.sizes[i]));
    PyTuple_SET_ITEM(strides, i, PyLong_FromLongLong(f.strides[i]));
  }
  if (PyErr_Occurred()) {
    Py_XDECREF(sizes), Py_XDECREF(strides);
    return NULL;
  }
  return Py_BuildValue("NNiiiNNK", sizes, strides, f.head.dtype, f.head.device, f.head.index, PyLong_FromVoidPtr(f.data),
                       PyBool_FromLong(f.head.grad), (unsigned long long)f.head.keys);
}
