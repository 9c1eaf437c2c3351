// What recording needs to know of an operator, looked up once.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

#include "python.h"

namespace membudget {

// How the recorder treats an operator; `other` is left to Python. `reshape` changes the
// geometry of its argument, in place.
enum class Kind {
  unknown, other, fresh, view, in_place, reshape, empty, constant, normalisation
};

struct Operator {
  Kind kind = Kind::unknown;
  PyObject* overload = nullptr;
  PyObject* facts = nullptr;
  PyObject* name = nullptr; // As `OperatorFacts.name`, interned.
  std::vector<size_t> tensors; // Positions of arguments that are tensors or lists.
  bool is_copy = false;
  bool is_random = false;

  bool writes_first() const { return kind == Kind::in_place || kind == Kind::reshape; }
};

// Python's `find_operator(name, overload)`.
inline PyObject* find_operator = nullptr;

inline Kind kind_named(PyObject* name) {
  const std::pair<const char*, Kind> kinds[] = {
      {"fresh", Kind::fresh},
      {"view", Kind::view},
      {"in_place", Kind::in_place},
      {"reshape", Kind::reshape},
      {"empty", Kind::empty},
      {"constant", Kind::constant},
      {"normalisation", Kind::normalisation}};
  for (auto [known, kind] : kinds) {
    if (PyUnicode_CompareWithASCIIString(name, known) == 0) {
      return kind;
    }
  }
  return Kind::other;
}

inline bool flag(PyObject* facts, const char* name) {
  return Ref::made(PyObject_GetAttrString(facts, name)) == Py_True;
}

// Looks an operator up. Others may do so at once: what is known changes in one go, and
// never again, since other threads read it from then on.
inline void look_up(Operator& known, const c10::OperatorName& name) {
  Ref found = Ref::made(PyObject_CallFunction(
      find_operator, "ss", name.name.c_str(), name.overload_name.c_str()));
  PyObject *overload, *facts, *kind, *tensors;
  if (!PyArg_ParseTuple(found, "OOOO", &overload, &facts, &kind, &tensors)) {
    throw_python_error();
  }
  Ref text = Ref::made(PyObject_GetAttrString(facts, "name"));
  Operator made{kind_named(kind), overload, facts, text};
  if (made.kind != Kind::other) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(tensors); ++i) {
      made.tensors.push_back(PyLong_AsSize_t(PyTuple_GetItem(tensors, i)));
    }
    made.is_copy = flag(facts, "is_copy");
    made.is_random = flag(facts, "is_random");
  }
  if (known.kind == Kind::unknown) {  // No other thread was faster, while Python ran.
    known = std::move(made);
    found.release();  // It and the name stay for as long as the process lives.
    text.release();
  }
}

} // namespace membudget
