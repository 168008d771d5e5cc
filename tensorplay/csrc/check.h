/* The key of one version as a table of steps.
 *
 * Steps before `is` read: v[dst] from v[src] and the object.  The others compare v[src] with the object; dst is a second
 * operand.  A step that reads a dictionary remembers what it found and the dictionary's version, where CPython counts
 * one (up to 3.12): while both are the same nothing has to be looked up. The dictionary was read just before from what
 * holds it, and an unchanged dictionary holds what it held, so what is remembered is alive and needs no reference. The
 * same holds for attributes of classes, by the version of the class. Comparisons that follow such a step and are decided
 * by which object it is need not be made again while it is the one that passed: nothing of it is touched.
 *
 * Always: what a check accepts, the Python key would accept; an error that is an Exception is a difference.
 */
#define OPS(X)                                                                                                          \
  X(argument) X(constant) X(item) X(attribute) X(field) X(cell) X(size) X(type) X(method) X(get) X(dict)                \
  X(keys) X(defined) X(result)                                                                                          \
  X(is) X(same) X(held) X(equal) X(tensor) X(module) X(names) X(members) X(absent) X(identical) X(outcome)
#define ENUM(name) OP_##name,
#define NAME(name) #name,
enum { OPS(ENUM) OP_count };
static const char *const op_names[] = {OPS(NAME)};

static int remembers(int op) {
  if (op == OP_names) return 4;
  if (op == OP_module || op == OP_attribute || op == OP_field) return 2;
  return op == OP_item || op == OP_absent || op == OP_members;
}
/* Comparisons with one object, which the object's identity decides: values that are compared never change. */
static int decided(int op) { return op == OP_is || op == OP_same || op == OP_held; }

typedef struct {
  int op, dst, src, owner; /* owner: of the dictionary that a field is read from */
  int skip, wanted;        /* comparisons that follow with what the step reads; whether anything else reads it */
  PyObject *passed;        /* what they held for last, compared by address with what is remembered */
  PyObject *object;        /* borrowed from `steps` */
  Seen *seen;              /* of the dictionaries that the step reads */
} Step;

/* What a container itself holds: the methods of a subclass may tell something else, and act. */
static PyObject *element_of(PyObject *from, PyObject *key) {
  int list = PyList_Check(from);
  if (!PyLong_CheckExact(key) || (!list && !PyTuple_Check(from))) return PyObject_GetItem(from, key);
  Py_ssize_t k = PyLong_AsSsize_t(key);
  return k == -1 && PyErr_Occurred() ? NULL : Py_XNewRef(list ? PyList_GetItem(from, k) : PyTuple_GetItem(from, k));
}
static Py_ssize_t size_of(PyObject *from) {
  return PyDict_Check(from) ? PyDict_Size(from) : PyList_Check(from) ? PyList_Size(from) : PyTuple_Check(from) ? PyTuple_Size(from)
       : PyAnySet_Check(from) ? PySet_Size(from) : PyObject_Size(from);
}
static PyObject *elements_of(PyObject *from) {
  if (!PyDict_Check(from) || PyDict_CheckExact(from)) return PySequence_Tuple(from);
  PyObject *keys = (PyODict_Check(from) ? &PyODict_Type : &PyDict_Type)->tp_iter(from);
  PyObject *made = keys ? PySequence_Tuple(keys) : NULL;
  Py_XDECREF(keys);
  return made;
}

typedef struct {
  PyObject_HEAD
  PyObject *expected;  /* the probes' values */
  PyObject *arguments; /* for each argument, keywords last: what `shows` compares it with */
  PyObject *keywords;  /* their names in order */
  PyObject *steps;
  Step *table;
  Seen *seen;
  Py_ssize_t count, slots, inputs, leaves; /* leaves: tensors and containers in the arguments */
  Py_ssize_t *reads;   /* slots of the inputs */
  int gated;
  PyObject *run;       /* (*inputs) -> flat outputs */
  PyObject *result;    /* an output's number, a tuple of numbers, or (flat, args, kwargs) -> result */
  int whole;           /* the result is the flat tuple itself */
  long long hits;
} Check;

static void check_dealloc(Check *self) {
  PyObject_GC_UnTrack(self);
  PyMem_Free(self->table), PyMem_Free(self->reads), PyMem_Free(self->seen);
  Py_XDECREF(self->expected), Py_XDECREF(self->arguments), Py_XDECREF(self->keywords), Py_XDECREF(self->steps);
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

/* The rows of `arguments`: a fingerprint, or a tuple that opens with one of these:
 * (VALUE, value) (HELD, reference, class) (ITEMS, class, rows) (DICT, keys, rows) (OBJECT, reference, class, keys, rows) */
enum { VALUE, HELD, ITEMS, DICT, OBJECT };
enum { DEEPEST = 16 };

/* The number of tensors and containers in a row; -1 where it is none. */
static Py_ssize_t leaves_of(PyObject *row, int depth) {
  if (PyBytes_CheckExact(row)) return PyBytes_GET_SIZE(row) < (Py_ssize_t)sizeof(Head) ? -1 : 1;
  if (!PyTuple_CheckExact(row) || PyTuple_GET_SIZE(row) < 2 || depth > DEEPEST) return -1;
  long kind = PyLong_Check(PyTuple_GET_ITEM(row, 0)) ? PyLong_AsLong(PyTuple_GET_ITEM(row, 0)) : -1;
  Py_ssize_t n = PyTuple_GET_SIZE(row);
  if (kind == VALUE) return n == 2 ? 0 : -1;
  if (kind == HELD) return n == 3 ? 0 : -1;
  if ((kind != ITEMS && kind != DICT && kind != OBJECT) || n != (kind == OBJECT ? 5 : 3)) return -1;
  PyObject *what = PyTuple_GET_ITEM(row, n - 2), *rows = PyTuple_GET_ITEM(row, n - 1);
  if (!PyTuple_CheckExact(rows) || (kind == ITEMS && !PyType_Check(what))) return -1;
  if (kind == ITEMS && !PyType_IsSubtype((PyTypeObject *)what, &PyTuple_Type) && what != (PyObject *)&PyList_Type) return -1;
  if (kind != ITEMS && (!PyTuple_CheckExact(what) || PyTuple_GET_SIZE(what) != PyTuple_GET_SIZE(rows))) return -1;
  Py_ssize_t total = 1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(rows); i++) {
    Py_ssize_t inner = leaves_of(PyTuple_GET_ITEM(rows, i), depth + 1);
    if (inner < 0) return -1;
    total += inner;
  }
  return total;
}

/* Finds the comparisons that follow each step which reads, and whether anything else uses what it reads. */
static int find_skips(Check *self) {
  int *uses = PyMem_Calloc((size_t)self->slots + 1, sizeof *uses);
  if (!uses) return 0;
  for (Py_ssize_t k = 0; k < self->count; k++) {
    const Step *s = self->table + k;
    if (s->src >= 0) uses[s->src]++;
    if (s->op >= OP_is && s->dst >= 0) uses[s->dst]++;
    if (s->owner >= 0) uses[s->owner]++;
  }
  for (Py_ssize_t k = 0; k < self->inputs; k++) uses[self->reads[k]]++;
  for (Py_ssize_t k = 0; k < self->count; k++) {
    Step *s = self->table + k;
    if (s->op != OP_item && s->op != OP_attribute && s->op != OP_field) continue;
    while (k + 1 + s->skip < self->count && decided(s[1 + s->skip].op) && s[1 + s->skip].src == s->dst) s->skip++;
    s->wanted = uses[s->dst] > s->skip;
  }
  PyMem_Free(uses);
  return 1;
}

/* Check(expected, arguments, keywords, steps, slots, inputs, gated, run, result) */
static PyObject *check_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  PyObject *expected, *arguments, *keywords, *steps, *inputs, *run, *result;
  Py_ssize_t slots;
  int gated;
  (void)kwargs;
  if (!PyArg_ParseTuple(args, "O!O!O!O!nO!pOO", &PyTuple_Type, &expected, &PyTuple_Type, &arguments, &PyTuple_Type, &keywords,
                        &PyTuple_Type, &steps, &slots, &PyTuple_Type, &inputs, &gated, &run, &result))
    return NULL;
  Check *self = (Check *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->expected = Py_NewRef(expected), self->arguments = Py_NewRef(arguments), self->keywords = Py_NewRef(keywords);
  self->steps = Py_NewRef(steps), self->run = Py_NewRef(run), self->result = Py_NewRef(result);
  self->slots = slots, self->gated = gated, self->count = PyTuple_GET_SIZE(steps), self->inputs = PyTuple_GET_SIZE(inputs);
  self->table = PyMem_Calloc((size_t)self->count + 1, sizeof *self->table);
  self->reads = PyMem_Calloc((size_t)self->inputs + 1, sizeof *self->reads);
  Py_ssize_t remembered = 0, given = PyTuple_GET_SIZE(arguments);
  int wrong = !self->table || !self->reads || slots > INT_MAX || PyTuple_GET_SIZE(keywords) > given;
  for (Py_ssize_t i = 0; !wrong && i < given; i++) {
    Py_ssize_t inner = leaves_of(PyTuple_GET_ITEM(arguments, i), 0);
    wrong = inner < 0;
    self->leaves += inner;
  }
  for (Py_ssize_t k = 0; !wrong && k < self->count; k++) {
    Step *s = self->table + k;
    const char *name;
    Py_ssize_t dst, src;
    Py_ssize_t owner = -1;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(steps, k), "snnO|n", &name, &dst, &src, &s->object, &owner)) break;
    for (s->op = 0; s->op < OP_count && strcmp(op_names[s->op], name); s->op++);
    wrong = s->op == OP_count || dst < -1 || dst >= slots || src < -1 || src >= slots || owner < -1 || owner >= slots;
    wrong |= (s->op == OP_field) != (owner >= 0);
    s->owner = (int)owner;
    if (s->op == OP_argument) wrong |= !PyLong_Check(s->object) || (size_t)PyLong_AsSsize_t(s->object) >= (size_t)given;
    s->dst = (int)dst, s->src = (int)src;
    remembered += remembers(s->op);
  }
  for (Py_ssize_t k = 0; !wrong && !PyErr_Occurred() && k < self->inputs; k++) {
    self->reads[k] = PyLong_AsSsize_t(PyTuple_GET_ITEM(inputs, k));
    wrong = self->reads[k] < 0 || self->reads[k] >= slots;
  }
  if (!wrong && !PyErr_Occurred()) {
    Seen *next = self->seen = PyMem_Calloc((size_t)remembered + 1, sizeof *self->seen);
    wrong = !next;
    for (Py_ssize_t k = 0; !wrong && k < self->count; k++) {
      self->table[k].seen = next;
      next += remembers(self->table[k].op);
    }
  }
  if (!wrong && !PyErr_Occurred() && !find_skips(self)) PyErr_NoMemory();
  if (PyTuple_Check(result)) {
    self->whole = 1;
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(result); k++) {
      self->whole &= PyLong_AsSsize_t(PyTuple_GET_ITEM(result, k)) == k;
    }
  }
  if (wrong && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "Check: known rows and steps, and slots within the table");
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

/* ---- arguments ---------------------------------------------------------------------------------------------------- */

/* The tensors and containers of a call: whether two are one object, and whether the call is the last one again. */
typedef struct {
  PyObject *object;
  void *data; /* null for containers */
} Leaf;

static int shows(PyObject *row, PyObject *x, Leaf **next);

/* Whether a dictionary has exactly these keys, in order, and its values are what the rows say. */
static int pairs_are(PyObject *dict, PyObject *keys, PyObject *rows, Leaf **next) {
  PyObject *key, *value;
  Py_ssize_t place = 0, i = 0, n = PyTuple_GET_SIZE(keys);
  int holds = PyDict_CheckExact(dict) && PyDict_GET_SIZE(dict) == n;
  while (holds && i < n && PyDict_Next(dict, &place, &key, &value)) {
    Py_INCREF(value); /* reading a tensor may let another thread run */
    holds = same_value(key, PyTuple_GET_ITEM(keys, i)) > 0 && shows(PyTuple_GET_ITEM(rows, i), value, next);
    Py_DECREF(value);
    i++;
  }
  PyErr_Clear();
  return holds && i == n;
}

/* Whether a value is what a row says; lists the tensors and containers at `*next`. */
static int shows(PyObject *row, PyObject *x, Leaf **next) {
  if (PyBytes_CheckExact(row)) {
    Leaf *leaf = (*next)++;
    leaf->object = x, leaf->data = NULL;
    return matches(x, row, &leaf->data);
  }
  PyObject *what = PyTuple_GET_ITEM(row, 1);
  int holds = 1;
  long kind = PyLong_AsLong(PyTuple_GET_ITEM(row, 0));
  if (kind == VALUE || kind == HELD || kind == OBJECT) {
    if (kind == VALUE) holds = same_value(x, what);
    else holds = (PyObject *)Py_TYPE(x) == PyTuple_GET_ITEM(row, 2) ? held_is(what, x) : 0;
    if (holds < 0) PyErr_Clear();
    if (holds <= 0 || kind != OBJECT) return holds > 0;
  }
  Leaf *leaf = (*next)++;
  leaf->object = x, leaf->data = NULL;
  if (kind == OBJECT) {
    PyObject *attributes = PyObject_GenericGetDict(x, NULL);
    holds = attributes && pairs_are(attributes, PyTuple_GET_ITEM(row, 3), PyTuple_GET_ITEM(row, 4), next);
    Py_XDECREF(attributes);
    if (!attributes) PyErr_Clear();
    return holds;
  }
  PyObject *rows = PyTuple_GET_ITEM(row, 2);
  if (kind == DICT) return pairs_are(x, what, rows, next);
  Py_ssize_t n = PyTuple_GET_SIZE(rows);
  if ((PyObject *)Py_TYPE(x) != what || PySequence_Fast_GET_SIZE(x) != n) return 0;
  for (Py_ssize_t i = 0; holds && i < n && (holds = PySequence_Fast_GET_SIZE(x) == n); i++) {
    PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(x, i));
    holds = shows(PyTuple_GET_ITEM(rows, i), item, next);
    Py_DECREF(item);
  }
  return holds;
}

/* Whether no two of n pointers, `stride` bytes apart, are equal; -1 without memory. */
static int all_distinct(const void *first, size_t stride, Py_ssize_t n) {
#define AT(i) (*(void *const *)((const char *)first + (size_t)(i)*stride))
  if (n <= 8) {
    for (Py_ssize_t i = 1; i < n; i++)
      for (Py_ssize_t j = 0; j < i; j++)
        if (AT(i) == AT(j)) return 0;
    return 1;
  }
  size_t size = 32;
  while (size < 3 * (size_t)n) size *= 2;
  void **seen = PyMem_Calloc(size, sizeof *seen);
  if (!seen) return -1;
  int out = 1;
  for (Py_ssize_t i = 0; out && i < n; i++) {
    void *x = AT(i);
    size_t at = ((uintptr_t)x >> 4) * 0x9E3779B97F4A7C15ull >> 20 & (size - 1);
    for (; seen[at] && seen[at] != x; at = (at + 1) & (size - 1));
    out = seen[at] != x;
    seen[at] = x;
  }
  PyMem_Free(seen);
  return out;
#undef AT
}

/* A call as its caller made it: the positional arguments, then those by keyword. */
typedef struct {
  PyObject *args, *kwargs; /* kwargs: null where there are none */
  PyObject **given, **names; /* names: of the last `named` */
  Py_ssize_t count, named;
} Call;

/* Whether the arguments are the check's; `leaves` has room for all. */
static int arguments_are(Check *c, const Call *call, Leaf *leaves) {
  Leaf *next = leaves;
  if (PyTuple_GET_SIZE(c->arguments) != call->count || PyTuple_GET_SIZE(c->keywords) != call->named) return 0;
  for (Py_ssize_t i = 0; i < call->named; i++) {
    PyObject *a = call->names[i], *b = PyTuple_GET_ITEM(c->keywords, i);
    if (a != b && (!PyUnicode_Check(a) || PyUnicode_Compare(a, b))) return 0;
  }
  for (Py_ssize_t i = 0; i < call->count; i++)
    if (!shows(PyTuple_GET_ITEM(c->arguments, i), call->given[i], &next)) return 0;
  int distinct = all_distinct(&leaves->object, sizeof *leaves, c->leaves);
  if (distinct < 0) PyErr_Clear();
  return distinct > 0;
}

/* ---- steps -------------------------------------------------------------------------------------------------------- */

/* Whether a module has no hooks and no forward of its own. */
static int module_is_plain(Seen *seen, PyObject *attributes) {
  if (!unchanged(seen, attributes)) {
    PyObject *after = PyDict_GetItemWithError(attributes, s_forward_hooks), *before = PyDict_GetItemWithError(attributes, s_forward_pre_hooks);
    if (!after || !before || !PyDict_Check(after) || !PyDict_Check(before) || PyDict_GetItemWithError(attributes, s_forward)) return 0;
    if (PyErr_Occurred() || PyDict_GET_SIZE(after) || PyDict_GET_SIZE(before)) return 0;
    remember(seen, attributes, after);
    seen[1].found = before;
    return 1;
  }
  return !PyDict_GET_SIZE(seen[0].found) && !PyDict_GET_SIZE(seen[1].found);
}

/* Whether a module's attributes, parameters, buffers and submodules have exactly these names, in order. */
static int names_are(Seen *seen, PyObject *attributes, PyObject *names) {
  PyObject *tables[4] = {attributes, NULL, NULL, NULL}, *const inner[] = {s_parameters, s_buffers, s_modules};
  int same = unchanged(seen, attributes);
  for (int k = 1; k < 4; k++) {
    tables[k] = same ? seen[k].dict : PyDict_GetItemWithError(attributes, inner[k - 1]);
    if (!tables[k] || !PyDict_CheckExact(tables[k])) return 0;
  }
  for (int k = 1; same && k < 4; k++) same = unchanged(seen + k, tables[k]);
  if (same) return 1;
  Py_ssize_t at = 0, n = PyTuple_GET_SIZE(names);
  for (int k = 0; k < 4; k++) {
    PyObject *key;
    Py_ssize_t place = 0;
    while (PyDict_Next(tables[k], &place, &key, NULL)) {
      if (at == n) return 0;
      PyObject *name = PyTuple_GET_ITEM(names, at++);
      if (key != name && same_value(key, name) != 1) return 0;
    }
  }
  if (at != n) return 0;
  for (int k = 0; k < 4; k++) remember(seen + k, tables[k], NULL);
  return 1;
}

/* Whether a class defines exactly the names in o[0], in order, apart from those in o[1]. */
static int members_are(Seen *seen, PyTypeObject *cls, PyObject *o) {
  if (same_class(seen, cls)) return 1;
  PyObject *names = PyTuple_GET_ITEM(o, 0), *besides = PyTuple_GET_ITEM(o, 1), *key;
  Py_ssize_t at = 0, n = PyTuple_GET_SIZE(names), place = 0;
  (void)_PyType_Lookup(cls, s_forward); /* gives a class that was changed a version */
  seen->dict = NULL;
  while (PyDict_Next(cls->tp_dict, &place, &key, NULL)) {
    if (at < n && key == PyTuple_GET_ITEM(names, at)) {
      at++;
      continue;
    }
    int ignored = PySet_Contains(besides, key);
    if (ignored < 0) return -1;
    if (ignored) continue;
    if (at == n || same_value(key, PyTuple_GET_ITEM(names, at++)) != 1) return 0;
  }
  if (at != n) return 0;
  see_class(seen, cls);
  return 1;
}

static PyObject *inputs_of(Check *self, PyObject **v) {
  PyObject *out = PyTuple_New(self->inputs);
  for (Py_ssize_t i = 0; out && i < self->inputs; i++) PyTuple_SET_ITEM(out, i, Py_NewRef(v[self->reads[i]]));
  return out;
}

/* f([first,] args, kwargs) */
static PyObject *with_arguments(PyObject *f, PyObject *first, const Call *call) {
  PyObject *named = call->kwargs ? Py_NewRef(call->kwargs) : PyDict_New();
  if (!named) return NULL;
  PyObject *given[] = {first, call->args, named};
  PyObject *out = PyObject_Vectorcall(f, first ? given : given + 1, first ? 3 : 2, NULL);
  Py_DECREF(named);
  return out;
}

/* Runs the steps on a call; 1: the call has this key, 0: it has not, -1: an error that is no Exception. */
static int check_steps(Check *self, const Call *call, PyObject **v) {
  Step *reader = NULL; /* the last step that read anew, and how many of its comparisons are left */
  int left = 0;
  for (Py_ssize_t k = 0; k < self->count; k++) {
    Step *s = self->table + k;
    PyObject *from = s->src >= 0 ? v[s->src] : NULL, *made = NULL, *o = s->object;
    int holds = 1, known = 0; /* known: it is what was remembered */
    switch (s->op) {
      case OP_argument: made = Py_NewRef(call->given[PyLong_AsSsize_t(o)]); break;
      case OP_constant: made = Py_NewRef(o); break;
      case OP_item:
        known = PyDict_Check(from) && unchanged(s->seen, from) && s->seen->found;
        if (!known) made = PyDict_Check(from) ? Py_XNewRef(value_of(s->seen, from, o)) : element_of(from, o);
        break;
      case OP_attribute:
        known = PyType_Check(from) && same_class(s->seen, (PyTypeObject *)from) && same_class(s->seen + 1, Py_TYPE(from));
        if (!known) made = PyType_Check(from) ? class_attribute(s->seen, (PyTypeObject *)from, o) : PyObject_GetAttr(from, o);
        break;
      case OP_field:
        known = unchanged(s->seen, from) && same_class(s->seen + 1, Py_TYPE(v[s->owner]));
        if (!known) made = own_attribute(s->seen, v[s->owner], from, o);
        break;
      case OP_cell: made = PyCell_Get(o); break;
      case OP_size: {
        Py_ssize_t n = size_of(from);
        made = n < 0 ? NULL : PyLong_FromSsize_t(n);
        break;
      }
      case OP_type: made = Py_NewRef((PyObject *)Py_TYPE(from)); break;
      case OP_method: made = PyObject_CallMethodNoArgs(from, o); break;
      case OP_get: made = with_arguments(o, NULL, call); break;
      case OP_dict: made = PyObject_GenericGetDict(from, NULL); break;
      case OP_keys: made = elements_of(from); break;
      case OP_defined: {
        int found = PyDict_CheckExact(from) ? PyDict_Contains(from, o) : -1;
        made = found < 0 ? NULL : Py_NewRef(found ? Py_True : Py_False);
        break;
      }
      case OP_result: made = PyObject_CallNoArgs(from); break;
      case OP_is: holds = from == o; break;
      case OP_same: holds = same_value(from, o); break;
      case OP_held: holds = held_is(o, from); break;
      case OP_equal: { /* (entry_of, expected) */
        PyObject *now = PyObject_CallOneArg(PyTuple_GET_ITEM(o, 0), from);
        holds = now ? PyObject_RichCompareBool(now, PyTuple_GET_ITEM(o, 1), Py_EQ) : -1;
        Py_XDECREF(now);
        break;
      }
      case OP_tensor: {
        void *data;
        holds = matches(from, o, &data);
        break;
      }
      case OP_module: /* dst: its attributes */
        holds = (PyObject *)Py_TYPE(from) == o && module_is_plain(s->seen, v[s->dst]);
        break;
      case OP_absent: /* dst: the attributes of a module */
        holds = unchanged(s->seen, v[s->dst]) ? !s->seen->found : !value_of(s->seen, v[s->dst], o) && !PyErr_Occurred();
        break;
      case OP_names: holds = names_are(s->seen, v[s->dst], o); break; /* dst: the attributes of a module */
      case OP_members: holds = PyType_Check(from) ? members_are(s->seen, (PyTypeObject *)from, o) : 0; break;
      case OP_identical: holds = from == v[s->dst]; break;
      case OP_outcome: { /* (inputs -> outcome, expected) */
        PyObject *inputs = inputs_of(self, v), *now = inputs ? PyObject_CallOneArg(PyTuple_GET_ITEM(o, 0), inputs) : NULL;
        holds = now ? PyObject_RichCompareBool(now, PyTuple_GET_ITEM(o, 1), Py_EQ) : -1;
        Py_XDECREF(inputs), Py_XDECREF(now);
        break;
      }
    }
    if (s->op < OP_is) {
      int decided_before = known && s->skip && s->passed == s->seen->found;
      if (decided_before) k += s->skip;
      if (decided_before && !s->wanted) continue;
      if (known) made = Py_NewRef(s->seen->found);
      else s->passed = NULL;
      reader = s->skip && !decided_before ? s : NULL, left = s->skip;
      if (!made) holds = -1;
      else if (v[s->dst]) Py_SETREF(v[s->dst], made);
      else v[s->dst] = made;
    } else if (reader && holds > 0 && decided(s->op) && !--left) reader->passed = from, reader = NULL;
    if (holds <= 0) { /* a value that can no longer be read is a difference */
      if (!PyErr_Occurred()) return 0;
      if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
      PyErr_Clear();
      return 0;
    }
  }
  return 1;
}

/* Runs the version's program on its inputs and makes the caller's result. */
static PyObject *check_run(Check *self, const Call *call, PyObject **inputs) {
  PyObject *flat, *out = NULL;
  PyObject *run = Py_NewRef(self->run), *result = Py_NewRef(self->result);
  if (Py_TYPE(run) == &LaunchType) flat = launch_run((Launch *)run, inputs, self->inputs);
  else flat = PyObject_Vectorcall(run, inputs, (size_t)self->inputs, NULL);
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
    out = with_arguments(result, flat, call);
  }
  Py_DECREF(flat);
done:
  Py_DECREF(run), Py_DECREF(result);
  return out;
}
