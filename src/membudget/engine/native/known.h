// What was verified of the calls of a region: as `verified` of `replay/verified.py`, of
// signatures that are known.

#pragma once

#include "history.h"

#include <torch/csrc/Size.h>

namespace membudget {

inline Class verified_class;
namespace verified {
inline Slot calls, has_subclasses, is_pending, is_sampled, paths, routes, sampling,
    unrepeatable;
}

inline Class routes_class;
namespace routes {
inline Slot is_due, known;
}

inline Class sampling_class;
namespace sampling {
inline Slot calls, every, is_due, seen;
}

inline PyObject *all_verified, *key_in_python, *switches, *verified_by_python;
inline PyObject *count_name, *device_name, *key_name, *postponed_name,
    *requires_grad_name;
inline long most_key_depth;

// `head`, and the key of each of some items.
template <typename KeyOf>
Ref keys_after(Ref head, Py_ssize_t count, const KeyOf& key_of_item) {
  Ref made = Ref::made(PyTuple_New(count + 1));
  PyTuple_SET_ITEM((PyObject*)made, 0, head.release());
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyTuple_SET_ITEM((PyObject*)made, i + 1, key_of_item(i).release());
  }
  return made;
}

inline bool is_leaf(PyObject* value) {
  return value == Py_None || PyLong_Check(value) || PyFloat_Check(value) ||
      PyUnicode_Check(value) || THPDtype_Check(value) || THPDevice_Check(value);
}

// As `key_of` of Python.
inline Ref key_of(PyObject* value, long depth) {
  auto next = [&](PyObject* part) { return key_of(part, depth + 1); };
  if (is_usual_class(value)) {
    return Ref::made(PyTuple_Pack(
        4, (PyObject*)attribute(value, shape_name), (PyObject*)attribute(value, dtype_name),
        (PyObject*)attribute(value, device_name),
        (PyObject*)attribute(value, requires_grad_name)));
  }
  Ref type = Ref::to((PyObject*)Py_TYPE(value));
  if (is_leaf(value)) {
    return pair(type, value);
  }
  if (depth >= most_key_depth && !THPVariable_Check(value)) {
    return type;
  }
  if (is_module(value)) {
    return pair(Ref::made(PyWeakref_NewRef(value, nullptr)), attribute(value, training_name));
  }
  if (PyMethod_Check(value)) {
    return pair(next(PyMethod_GET_SELF(value)), PyMethod_GET_FUNCTION(value));
  }
  if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
    return keys_after(std::move(type), PySequence_Fast_GET_SIZE(value), [&](Py_ssize_t i) {
      return next(PySequence_Fast_GET_ITEM(value, i));
    });
  }
  if (PyFunction_Check(value)) {
    auto* of = reinterpret_cast<PyFunctionObject*>(value);
    PyObject* cells = of->func_closure;
    Py_ssize_t count = cells == nullptr ? 0 : PyTuple_GET_SIZE(cells);
    return keys_after(Ref::to(of->func_code), count, [&](Py_ssize_t i) {
      PyObject* content = PyCell_GET(PyTuple_GET_ITEM(cells, i));
      return next(content == nullptr ? Py_None : content);
    });
  }
  return Ref::made(
      PyObject_CallFunctionObjArgs(key_in_python, value, (PyObject*)number(depth), nullptr));
}

// As `_without_sizes`.
inline Ref without_sizes(PyObject* key) {
  if (PyTuple_CheckExact(key)) {
    Ref made = Ref::made(PyTuple_New(PyTuple_GET_SIZE(key)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(key); ++i) {
      PyTuple_SET_ITEM((PyObject*)made, i, without_sizes(PyTuple_GET_ITEM(key, i)).release());
    }
    return made;
  }
  if (Py_TYPE(key) == &THPSizeType) {
    return number(PyTuple_GET_SIZE(key));
  }
  bool is_number = PyLong_CheckExact(key) || PyFloat_CheckExact(key);
  return Ref::to(is_number ? (PyObject*)Py_TYPE(key) : key);
}

// The keys of a function and its arguments.
inline Ref called_key(PyObject* function, PyObject* args, PyObject* kwargs) {
  Py_ssize_t given = PyTuple_GET_SIZE(args);
  Ref made = Ref::made(PyTuple_New(1 + given + PyDict_GET_SIZE(kwargs)));
  PyTuple_SET_ITEM((PyObject*)made, 0, key_of(function, 0).release());
  for (Py_ssize_t i = 0; i < given; ++i) {
    PyTuple_SET_ITEM((PyObject*)made, i + 1, key_of(PyTuple_GET_ITEM(args, i), 0).release());
  }
  PyObject *name, *value;
  for (Py_ssize_t i = 0, at = given; PyDict_Next(kwargs, &i, &name, &value);) {
    PyTuple_SET_ITEM((PyObject*)made, ++at, pair(name, key_of(value, 0)).release());
  }
  return made;
}

// As `Sampling.count`, of sizes that have been seen.
inline void count_sample(PyObject* of, PyObject* sizes) {
  Ref hash = number(PyObject_Hash(sizes));
  long calls = sampling::calls.number(of) + 1;
  bool is_usual = PySet_Contains(sampling::seen.of(of), hash) == 1 &&
      calls % sampling::every.number(of) != 0 &&
      attribute_of(switches, postponed_name) == Py_False;
  if (!is_usual) {
    call(of, count_name, sizes);
    return;
  }
  sampling::is_due.set(of, Py_False);
  sampling::calls.set_number(of, calls);
}

// As `Verified.count`.
inline void count_call(PyObject* of) {
  long number = verified::calls.number(of) + 1;
  if ((number & (number - 1)) == 0) {
    call(of, count_name);
    return;
  }
  verified::is_sampled.set(of, Py_False);
  verified::calls.set_number(of, number);
}

// As `verified`.
inline Ref known_of(PyObject* options, PyObject* function, PyObject* args, PyObject* kwargs) {
  Ref called = called_key(function, args, kwargs);
  PyObject* asked = options::verify.of(options);
  PyObject* share = PyFloat_CheckExact(asked) ? asked : Py_None;
  Ref key = Ref::made(PyTuple_Pack(
      4, (PyObject*)attribute(options::policy.of(options), key_name), share,
      (PyObject*)autocast_key(), (PyObject*)(share == Py_None ? called : without_sizes(called))));
  PyObject* found = PyDict_GetItemWithError(all_verified, key);
  if (found == nullptr) {
    PyErr_Clear();  // Of a key that cannot be hashed, which Python reports.
    return Ref::made(PyObject_CallFunctionObjArgs(
        verified_by_python, options, function, args, kwargs, nullptr));
  }
  Ref made = Ref::to(found);
  count_call(made);
  if (!verified::sampling.is_none(made)) {
    count_sample(verified::sampling.of(made), called);
  }
  return made;
}

} // namespace membudget
