// Random generators whose state is compared where it lies: as `Sources` of `rng.py`.

#pragma once

#include "tape.h"

#include <cstring>

namespace membudget {

inline Class source_class;
namespace source {
inline Slot mark;
}

inline PyObject* bring_all_back;
inline PyObject *last_name, *note_name, *places_name;

// Whether a part of a generator's state is what a mark says.
inline bool is_same_part(PyObject* place, PyObject* marked) {
  PyObject* first = PyTuple_GET_ITEM(place, 0);
  PyObject* second = PyTuple_GET_ITEM(place, 1);
  if (!PyLong_CheckExact(first)) {
    return attribute(first, second) == marked;
  }
  return PyBytes_CheckExact(marked) && PyBytes_GET_SIZE(marked) == PyLong_AsSsize_t(second) &&
      std::memcmp(PyBytes_AS_STRING(marked), PyLong_AsVoidPtr(first), PyBytes_GET_SIZE(marked)) == 0;
}

inline bool is_same_mark(PyObject* reader, PyObject* mark) {
  Ref places = attribute_of(reader, places_name);
  if (places == nullptr) {
    Ref now = Ref::made(PyObject_CallNoArgs(reader));
    int same = PyObject_RichCompareBool(now, mark, Py_EQ);
    check(same);
    return same == 1;
  }
  Py_ssize_t count = PyTuple_GET_SIZE((PyObject*)places);
  if (count == 1) {
    return is_same_part(PyTuple_GET_ITEM((PyObject*)places, 0), mark);
  }
  if (!PyTuple_CheckExact(mark) || PyTuple_GET_SIZE(mark) != count) {
    return false;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!is_same_part(PyTuple_GET_ITEM((PyObject*)places, i), PyTuple_GET_ITEM(mark, i))) {
      return false;
    }
  }
  return true;
}

// Whether all generators have the states that were noted.
inline bool have_states(PyObject* noted) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(noted); ++i) {
    PyObject* pair = PyList_GET_ITEM(noted, i);
    PyObject* state = PyTuple_GET_ITEM(pair, 1);
    if (!is_same_mark(
            source::mark.of(PyTuple_GET_ITEM(pair, 0)), PyTuple_GET_ITEM(state, 0))) {
      return false;
    }
  }
  return true;
}

// As `Sources.note`.
inline Ref note_generators(PyObject* sources) {
  Ref last = attribute(sources, last_name);
  return last != Py_None && have_states(last) ? last : call(sources, note_name);
}

// As `bring_all_back`.
inline void restore_generators(PyObject* noted) {
  if (!have_states(noted)) {
    Ref::made(PyObject_CallOneArg(bring_all_back, noted));
  }
}

} // namespace membudget
