// The names that a region can reach: as `Reached._module`, `Bindings` and `rebind`.

#pragma once

#include "rerun.h"

namespace membudget {

inline Class reached_class;
namespace reached {
inline Slot attributes, buffers, containers, functions, generators, modules, names, objects, seen, slots,
    stateful_modules, tensors;
}

inline long most_depth;
inline PyObject *attribute_names, *class_slots, *known_attributes, *module_visitor, *no_text,
    *visitors;
inline PyObject *buffers_name, *class_name, *dict_name, *modules_name, *note_buffers_name,
    *parameters_name, *pre_hooks_name, *values_name, *visit_name;

inline Ref dict_of(PyObject* object) {
  return attribute(object, dict_name);
}

inline PyObject* held_by(PyObject* dict, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(dict, name);
  return found != nullptr && PyDict_CheckExact(found) ? found : nullptr;
}

// Calls `with(key, value)` for each item of a dict, which the calls may not change.
template <typename Function>
void each_item(PyObject* dict, Function with) {
  PyObject *key, *value;
  Py_ssize_t place = 0;
  while (PyDict_Next(dict, &place, &key, &value)) {
    with(key, value);
  }
}

template <typename Function>
void each(PyObject* list, Function with) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    with(PyList_GET_ITEM(list, i));
  }
}

inline void extend(PyObject* list, PyObject* items) {
  check(PyList_SetSlice(list, PyList_GET_SIZE(list), PyList_GET_SIZE(list), items));
}

// What names are bound to.

inline void append(PyObject* list, PyObject* item) {
  check(PyList_Append(list, item == nullptr ? Py_None : item));
}

inline void append_values(PyObject* list, PyObject* of) {
  extend(list, PyDict_Check(of) ? Ref::made(PyObject_CallMethodNoArgs(of, values_name)) : Ref::to(of));
}

inline void append_module(PyObject* list, PyObject* module) {
  Ref dict = dict_of(module);
  for (PyObject* name : {parameters_name, buffers_name, modules_name}) {
    PyObject* held = held_by(dict, name);
    if (held == nullptr) {
      append_values(list, Ref::made(PyObject_GetItem(dict, name)));
      continue;
    }
    each_item(held, [&](PyObject*, PyObject* value) { append(list, value); });
  }
}

inline void append_function(PyObject* list, PyObject* function) {
  auto* of = reinterpret_cast<PyFunctionObject*>(function);
  append(list, of->func_code);
  append(list, of->func_defaults);
  append(list, of->func_kwdefaults);
  for (Py_ssize_t i = 0; of->func_closure && i < PyTuple_GET_SIZE(of->func_closure); ++i) {
    PyObject* content = PyCell_GET(PyTuple_GET_ITEM(of->func_closure, i));
    if (content != nullptr) {
      append(list, content);
    }
  }
}

// bound_now(reached): as `_bound_now`.
inline PyObject* bound_now(PyObject*, PyObject* of) {
  HANDLE_TH_ERRORS
  Ref list = Ref::made(PyList_New(0));
  each(reached::modules.of(of), [&](PyObject* module) { append_module(list, module); });
  each(reached::objects.of(of), [&](PyObject* object) {
    Ref dict = attribute_of(object, dict_name);
    if (dict != nullptr) {  // It has no slots.
      append_values(list, dict);
    }
  });
  each(reached::attributes.of(of), [&](PyObject* pair) {
    PyObject* dict = PyTuple_GET_ITEM(pair, 0);
    append(list, number(PyDict_GET_SIZE(dict)));
    each(PyTuple_GET_ITEM(pair, 1), [&](PyObject* key) {
      append(list, PyDict_GetItemWithError(dict, key));
    });
  });
  each(reached::containers.of(of), [&](PyObject* pair) {
    append_values(list, PyTuple_GET_ITEM(pair, 0));
  });
  each(reached::functions.of(of), [&](PyObject* function) { append_function(list, function); });
  each(reached::slots.of(of), [&](PyObject* slot) {
    append(list, PyDict_GetItemWithError(PyTuple_GET_ITEM(slot, 0), PyTuple_GET_ITEM(slot, 1)));
  });
  return list.release();
  END_HANDLE_TH_ERRORS
}

// are_same(list, list): whether two lists hold the same objects.
inline PyObject* are_same_lists(PyObject*, PyObject* const* given, Py_ssize_t) {
  PyObject *one = given[0], *other = given[1];
  Py_ssize_t count = PyList_GET_SIZE(one);
  bool same = count == PyList_GET_SIZE(other);
  for (Py_ssize_t i = 0; same && i < count; ++i) {
    same = PyList_GET_ITEM(one, i) == PyList_GET_ITEM(other, i);
  }
  return PyBool_FromLong(same);
}

// are_same_names(dict, dict): whether two dicts bind the same names, in one order, to
// the same objects; if not, they may still, in another order.
inline PyObject* are_same_names(PyObject*, PyObject* const* given, Py_ssize_t) {
  Py_ssize_t here = 0, there = 0;
  PyObject *key, *value, *other_key, *other;
  bool same = PyDict_GET_SIZE(given[0]) == PyDict_GET_SIZE(given[1]);
  while (same && PyDict_Next(given[0], &here, &key, &value)) {
    same = PyDict_Next(given[1], &there, &other_key, &other) && key == other_key &&
        value == other;
  }
  return PyBool_FromLong(same);
}

// The walk.

inline void walk(PyObject* of, PyObject* module, long depth);

// Whether a value's class references nothing; a metaclass may raise an error.
inline bool is_inert(PyObject* value) {
  int found = PySet_Contains(inert_types, reinterpret_cast<PyObject*>(Py_TYPE(value)));
  check(found);
  return found == 1;
}

// As `Reached.visit`, without names.
inline void visit(PyObject* of, PyObject* value, long depth) {
  if (is_inert(value)) {
    return;
  }
  auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(value));
  if (PyDict_GetItemWithError(visitors, kind) != module_visitor) {
    call(of, visit_name, value, (PyObject*)no_text, (PyObject*)number(depth));
    return;
  }
  Ref identity = Ref::made(PyLong_FromVoidPtr(value));
  int is_seen = PySet_Contains(reached::seen.of(of), identity);
  check(is_seen);
  if (is_seen) {
    append(reached::modules.of(of), value);
    return;
  }
  check(PySet_Add(reached::seen.of(of), identity));
  walk(of, value, depth);
}

// As `Reached._class`.
inline bool is_users(PyObject* of, PyObject* module) {
  auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(module));
  Ref known = Ref::made(PyObject_CallOneArg(class_slots, kind));
  if (PyList_GET_SIZE(PyTuple_GET_ITEM((PyObject*)known, 0)) != 0) {
    return call(of, class_name, kind) == Py_True;
  }
  return PyTuple_GET_ITEM((PyObject*)known, 1) == Py_True;
}

inline void walk_held(PyObject* of, PyObject* held, long depth) {
  if (PyDict_CheckExact(held) && PyDict_GET_SIZE(held) == 0) {
    return;
  }
  // Copied, as a visit may run code of the user.
  Ref items = Ref::made(
      PyDict_CheckExact(held)
          ? PyDict_Values(held)
          : PySequence_List(Ref::made(PyObject_CallMethodNoArgs(held, values_name))));
  each(items, [&](PyObject* item) {
    if (Py_TYPE(item) == parameter_type) {
      append(reached::tensors.of(of), item);
    } else if (item != Py_None) {
      visit(of, item, depth);
    }
  });
}

// Whether a dict has just these keys, in this order; if not, it may, as other objects.
inline bool has_keys(PyObject* dict, PyObject* keys) {
  bool same = PyDict_GET_SIZE(dict) == PyList_GET_SIZE(keys);
  PyObject *key, *value;
  Py_ssize_t place = 0;
  for (Py_ssize_t i = 0; same && PyDict_Next(dict, &place, &key, &value); ++i) {
    same = key == PyList_GET_ITEM(keys, i);
  }
  return same;
}

// As `attribute_names`.
inline Ref attribute_names_of(PyObject* module, PyObject* dict) {
  PyObject* known = PyDict_GetItemWithError(
      known_attributes, Ref::made(PyLong_FromVoidPtr(module)));
  if (known != nullptr && has_keys(dict, PyTuple_GET_ITEM(known, 0))) {
    return Ref::to(PyTuple_GET_ITEM(known, 1));
  }
  return Ref::made(PyObject_CallFunctionObjArgs(attribute_names, module, dict, nullptr));
}

inline void walk_attribute(PyObject* of, PyObject* item, long depth) {
  if (THPVariable_Check(item) && THPVariable_Unpack(item).grad_fn() == nullptr) {
    append(reached::buffers.of(of), item);
  }
  if (depth < most_depth) {
    visit(of, item, depth + 1);
  }
}

// As `Reached._module`, without names.
inline void walk(PyObject* of, PyObject* module, long depth) {
  Deeper deeper(" while a region looks for what it reads");
  append(reached::modules.of(of), module);
  Ref dict = dict_of(module);
  int has_hooks = PyObject_IsTrue(Ref::made(PyObject_GetItem(dict, pre_hooks_name)));
  check(has_hooks);
  if (is_users(of, module) || has_hooks) {
    append(reached::stateful_modules.of(of), module);
  }
  for (PyObject* name : {parameters_name, buffers_name, modules_name}) {
    walk_held(of, Ref::made(PyObject_GetItem(dict, name)), depth);
  }
  int has_buffers = PyObject_IsTrue(Ref::made(PyObject_GetItem(dict, buffers_name)));
  check(has_buffers);
  if (has_buffers) {
    call(of, note_buffers_name, module);
  }
  Ref keys = attribute_names_of(module, dict);
  if (depth < most_depth) {
    append(reached::attributes.of(of), pair(dict, keys));
  }
  each(keys, [&](PyObject* key) {
    Ref item = Ref::to(PyDict_GetItemWithError(dict, key));
    walk_attribute(of, item == nullptr ? Py_None : (PyObject*)item, depth);
  });
}

// walk(reached, module, depth): as `Reached._module`.
inline PyObject* walk_module(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  walk(given[0], given[1], PyLong_AsLong(given[2]));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
