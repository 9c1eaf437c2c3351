// The signature of a call, and the history of those that have it: as `callees.py` and
// `calls.py`, in the common cases.

#pragma once

#include "begin.h"

namespace membudget {

using Entries = std::vector<Ref>;

inline void note_identity(PyObject* value, Entries& key) {
  key.push_back(Ref::made(PyLong_FromVoidPtr(value)));
}

// Adds a value to a signature; false if Python must.
inline bool describe(PyObject* value, Entries& key) {
  if (is_usual_class(value)) {
    key.push_back(attribute(value, shape_name));
    key.push_back(attribute(value, dtype_name));
  } else if (value == Py_None || PyBool_Check(value) || PyUnicode_CheckExact(value)) {
    key.push_back(Ref::to(value));
  } else if (PyLong_CheckExact(value) || PyFloat_CheckExact(value)) {
    key.push_back(Ref::to((PyObject*)Py_TYPE(value)));
  } else if (is_module(value)) {
    note_identity(value, key);
    key.push_back(attribute(value, training_name));
  } else {
    return false;
  }
  return true;
}

inline bool describe_function(PyObject* value, Entries& key) {
  auto* of = reinterpret_cast<PyFunctionObject*>(value);
  note_identity(of->func_code, key);
  Py_ssize_t cells = of->func_closure == nullptr ? 0 : PyTuple_GET_SIZE(of->func_closure);
  for (Py_ssize_t i = 0; i < cells; ++i) {
    PyObject* content = PyCell_GET(PyTuple_GET_ITEM(of->func_closure, i));
    if (content != nullptr && !describe(content, key)) {
      return false;
    }
  }
  return true;
}

inline bool describe_callee(PyObject* value, Entries& key) {
  if (PyFunction_Check(value)) {
    return describe_function(value, key);
  }
  if (PyMethod_Check(value)) {
    return is_module(PyMethod_GET_SELF(value)) && describe(PyMethod_GET_SELF(value), key) &&
        PyFunction_Check(PyMethod_GET_FUNCTION(value)) &&
        describe_function(PyMethod_GET_FUNCTION(value), key);
  }
  return is_module(value) && describe(value, key);
}

inline Ref autocast_key() {
  return is_autocast_on() ? Ref::made(PyObject_CallNoArgs(autocast_state))
                          : Ref::to(no_targets);
}

// signature(function, args, kwargs): as `signature_of`; `None` if Python must.
inline PyObject* signature(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Entries key;
  key.reserve(16);
  key.push_back(autocast_key());
  bool is_known = PyDict_GET_SIZE(given[2]) == 0 && describe_callee(given[0], key);
  for (Py_ssize_t i = 0; is_known && i < PyTuple_GET_SIZE(given[1]); ++i) {
    is_known = describe(PyTuple_GET_ITEM(given[1], i), key);
  }
  if (!is_known) {
    Py_RETURN_NONE;
  }
  Ref made = Ref::made(PyTuple_New(key.size()));
  for (size_t i = 0; i < key.size(); ++i) {
    PyTuple_SET_ITEM((PyObject*)made, i, key[i].release());
  }
  return made.release();
  END_HANDLE_TH_ERRORS
}

// As `Calls.begin(again)`.
inline bool begin_call(PyObject* of, PyObject* again) {
  long number = calls::count.number(of) + 1;
  bool may_be_due = (number & (number - 1)) == 0;
  if (may_be_due || !calls::is_settled.is_true(of) || !calls::sampling.is_none(of) ||
      owner::adds_gradients.is_true(calls::owner.of(of))) {
    return call(of, begin_name, again) == Py_True;
  }
  calls::count.set_number(of, number);
  return false;
}

// Whether the latest call of as many saved tensors had the same.
inline bool is_known_path(PyObject* of, PyObject* path) {
  PyObject* known =
      PyDict_GetItemWithError(calls::paths.of(of), number(PyList_GET_SIZE(path)));
  if (known == nullptr) {
    return false;
  }
  int same = PyObject_RichCompareBool(known, path, Py_EQ);
  check(same);
  return same == 1;
}

} // namespace membudget
