// Forget tensors and storages that have died: the callbacks of weak references, with the
// tables of the tracker as `self`.

#pragma once

#include "tape.h"

namespace membudget {

inline void forget_key(PyObject* table, PyObject* key) {
  if (PyDict_Contains(table, key) == 1) {
    check(PyDict_DelItem(table, key));
  }
}

// forget(entry): a tensor has died.
inline PyObject* forget(PyObject* tables, PyObject* dead) {
  HANDLE_TH_ERRORS
  Ref entry = Ref::to(dead);  // The table may have the last reference.
  PyObject* key = entry::key.of(entry);
  forget_key(PyTuple_GET_ITEM(tables, 0), key);
  PyObject* at =
      PyDict_GetItemWithError(PyTuple_GET_ITEM(tables, 1), entry::address.of(entry));
  if (at != nullptr) {
    forget_key(place::entries.of(at), key);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// freed(place): a storage has died.
inline PyObject* freed(PyObject* tables, PyObject* object) {
  HANDLE_TH_ERRORS
  Ref dead = Ref::to(object);
  PyObject* places = PyTuple_GET_ITEM(tables, 1);
  PyObject* address = place::address.of(dead);
  add(memory::epoch, place::memory.of(dead), 1);
  if (PyDict_GetItemWithError(places, address) == dead) {
    check(PyDict_DelItem(places, address));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyMethodDef forget_method = {"forget", forget, METH_O, nullptr};
inline PyMethodDef freed_method = {"freed", freed, METH_O, nullptr};

// callbacks(table, places): both, as functions that hold the tables, not the tracker.
inline PyObject* callbacks(PyObject*, PyObject* tables) {
  return bound_pair(&forget_method, &freed_method, tables);
}

} // namespace membudget
