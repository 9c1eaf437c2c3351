// The state that a region can reach, noted and compared: as `Reads`.

#pragma once

#include "reach.h"

namespace membudget {

inline Class reads_class;
namespace reads {
inline Slot addresses, modules, namespaces, parameters, tensors, training, versions;
}

inline PyObject *address_of_python, *detach_name, *version_of_python;

inline bool has_history(PyObject* tensor) {
  return THPVariable_Check(tensor) && THPVariable_Unpack(tensor).grad_fn() != nullptr;
}

// Of a subclass, Python keeps the class.
inline Ref detached(PyObject* tensor) {
  return is_usual_class(tensor) ? wrapped(THPVariable_Unpack(tensor).detach())
                                : Ref::made(PyObject_CallMethodNoArgs(tensor, detach_name));
}

inline Ref version_now(PyObject* tensor) {
  return is_common(tensor) ? number(THPVariable_Unpack(tensor)._version())
                           : Ref::made(PyObject_CallOneArg(version_of_python, tensor));
}

inline Ref address_now(PyObject* tensor) {
  return is_common(tensor) ? number(address_of(THPVariable_Unpack(tensor)))
                           : Ref::made(PyObject_CallOneArg(address_of_python, tensor));
}

// A list of what a function makes of each item of another.
template <typename Function>
Ref mapped(PyObject* list, Function made_of) {
  Ref made = Ref::made(PyList_New(PyList_GET_SIZE(list)));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyList_SET_ITEM((PyObject*)made, i, made_of(PyList_GET_ITEM(list, i)).release());
  }
  return made;
}

inline Ref training_now(PyObject* module) {
  return attribute(module, training_name);
}

// Appends a dict and a copy of it, in which no tensor has a history.
inline void append_copy(PyObject* pairs, PyObject* of, bool requires_grad) {
  Ref copy = Ref::made(PyDict_Copy(of));
  each_item(of, [&](PyObject* key, PyObject* value) {
    if (has_history(value)) {
      Ref alias = detached(value);
      if (requires_grad) {
        THPVariable_Unpack(alias).set_requires_grad(true);
      }
      check(PyDict_SetItem(copy, key, alias));
    }
  });
  append(pairs, Ref::made(PyTuple_Pack(2, of, (PyObject*)copy)));
}

// Appends what each module holds under a name, unless it is empty.
inline void append_held(PyObject* pairs, PyObject* modules, PyObject* name, bool requires_grad) {
  each(modules, [&](PyObject* module) {
    Ref held = Ref::made(PyObject_GetItem(dict_of(module), name));
    if (PyDict_Check(held) && PyDict_GET_SIZE((PyObject*)held) != 0) {
      append_copy(pairs, held, requires_grad);
    }
  });
}

// note_reads(reads, reached): as `Reads._note`.
inline PyObject* note_reads(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject *of = given[0], *modules = reached::modules.of(given[1]);
  Ref tensors = mapped(reached::tensors.of(given[1]), [](PyObject* tensor) {
    return has_history(tensor) ? detached(tensor) : Ref::to(tensor);
  });
  reads::versions.set(of, mapped(tensors, version_now));
  reads::addresses.set(of, mapped(tensors, address_now));
  reads::tensors.set(of, std::move(tensors));
  reads::modules.set(of, modules);
  reads::training.set(of, mapped(modules, training_now));
  Ref namespaces = Ref::made(PyList_New(0)), parameters = Ref::made(PyList_New(0));
  append_held(namespaces, modules, buffers_name, false);
  each(reached::stateful_modules.of(given[1]), [&](PyObject* module) {
    append_copy(namespaces, dict_of(module), true);
  });
  append_held(parameters, modules, parameters_name, true);
  reads::namespaces.set(of, std::move(namespaces));
  reads::parameters.set(of, std::move(parameters));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline bool is_same(Ref now, PyObject* noted) {
  int same = PyObject_RichCompareBool(now, noted, Py_EQ);  // At once if it is one object.
  check(same);
  return same == 1;
}

// Whether each item of a list still has what was noted of it.
template <typename Function>
bool are_as_noted(PyObject* list, PyObject* noted, Function now) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    if (!is_same(now(PyList_GET_ITEM(list, i)), PyList_GET_ITEM(noted, i))) {
      return false;
    }
  }
  return true;
}

// has_versions(reads): whether the tensors have the versions and addresses noted.
inline PyObject* has_versions(PyObject*, PyObject* of) {
  HANDLE_TH_ERRORS
  PyObject* tensors = reads::tensors.of(of);
  return PyBool_FromLong(
      are_as_noted(tensors, reads::versions.of(of), version_now) &&
      are_as_noted(tensors, reads::addresses.of(of), address_now));
  END_HANDLE_TH_ERRORS
}

// has_names(reads): whether training flags and parameters are those of the forward.
inline PyObject* has_names(PyObject*, PyObject* of) {
  HANDLE_TH_ERRORS
  bool same = are_as_noted(reads::modules.of(of), reads::training.of(of), training_now);
  PyObject* pairs = reads::parameters.of(of);
  for (Py_ssize_t i = 0; same && i < PyList_GET_SIZE(pairs); ++i) {
    PyObject* pair = PyList_GET_ITEM(pairs, i);
    each_item(PyTuple_GET_ITEM(pair, 1), [&](PyObject* key, PyObject* noted) {
      same = same && PyDict_GetItemWithError(PyTuple_GET_ITEM(pair, 0), key) == noted;
    });
  }
  return PyBool_FromLong(same);
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
