/* What was found in a dictionary or a class before, and whether it is still there.
 *
 * Always: what is remembered is borrowed: an unchanged dictionary or class holds what it held.
 */
typedef struct {
  PyObject *dict, *found;
  uint64_t version;
} Seen;

#if PY_VERSION_HEX < 0x030D0000 && !defined(Py_LIMITED_API)
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#endif
static int unchanged(const Seen *s, PyObject *dict) {
  return s->dict == dict && s->version == ((PyDictObject *)dict)->ma_version_tag;
}
static void remember(Seen *s, PyObject *dict, PyObject *found) {
  s->dict = dict, s->found = found, s->version = ((PyDictObject *)dict)->ma_version_tag;
}
#else
static int unchanged(const Seen *s, PyObject *dict) { return (void)s, (void)dict, 0; }
static void remember(Seen *s, PyObject *dict, PyObject *found) { (void)s, (void)dict, (void)found; }
#endif

/* The value of a key, borrowed, null where there is none or with an error set. */
static PyObject *value_of(Seen *s, PyObject *dict, PyObject *key) {
  if (unchanged(s, dict)) return s->found;
  PyObject *found = PyDict_GetItemWithError(dict, key);
  if (found || !PyErr_Occurred()) remember(s, dict, found);
  return found;
}

/* Whether a class is the one that was seen, unchanged since, with all its bases. */
static int same_class(const Seen *s, PyTypeObject *cls) {
  return s->dict == (PyObject *)cls && cls->tp_version_tag && s->version == cls->tp_version_tag;
}
static void see_class(Seen *s, PyTypeObject *cls) { s->dict = (PyObject *)cls, s->version = cls->tp_version_tag; }

/* Whether a value that a class holds is what its attribute gives, for good: no descriptor, and of a type that cannot
 * become one. A function is one, but gives itself to its class. */
static int plain_value(PyObject *x) { return !Py_TYPE(x)->tp_descr_get && !Py_TYPE(x)->tp_descr_set && !(Py_TYPE(x)->tp_flags & Py_TPFLAGS_HEAPTYPE); }

/* An attribute of a class: what the class or a base holds, as it is. */
static PyObject *class_attribute(Seen *s, PyTypeObject *cls, PyObject *name) {
  PyObject *made = PyObject_GetAttr((PyObject *)cls, name);
  s[0].dict = s[1].dict = NULL;
  if (!made || Py_TYPE(cls)->tp_getattro != PyType_Type.tp_getattro || _PyType_Lookup(cls, name) != made) return made;
  if (_PyType_Lookup(Py_TYPE(cls), name) || !(plain_value(made) || PyFunction_Check(made))) return made;
  see_class(s, cls), see_class(s + 1, Py_TYPE(cls)); /* looking up gave both a version */
  s[0].found = made;
  return made;
}

/* An attribute that stands in the owner's own dictionary, and that its class does not hide. */
static PyObject *own_attribute(Seen *s, PyObject *owner, PyObject *dict, PyObject *name) {
  PyObject *made = PyObject_GetAttr(owner, name), *held = made ? PyDict_GetItemWithError(dict, name) : NULL;
  s[0].dict = s[1].dict = NULL;
  if (made && PyErr_Occurred()) PyErr_Clear();
  if (!made || held != made || _PyType_Lookup(Py_TYPE(owner), s_getattribute) != plain_getattribute) return made;
  PyObject *above = _PyType_Lookup(Py_TYPE(owner), name);
  if (!above || plain_value(above)) remember(s, dict, made), see_class(s + 1, Py_TYPE(owner));
  return made;
}
