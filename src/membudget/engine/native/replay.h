// Plan and run a replay: the common paths of `Replayer` and `Executor`.
//
// Python runs what was recorded in Python (custom operators, several writes at once),
// checks sources that look changed, and begins the stages of backward passes.

#pragma once

#include <algorithm>
#include <unordered_set>

#include "tracking.h"

namespace membudget {

inline Class replayer_class;
namespace replayer {
inline Slot begins, enter, entries, handles, memoised, plan, plan_ran, plans_run, stage, stages, stream, task, trip;
}

inline Class handle_class;
namespace handle {
inline Slot fingerprint, saved_version, served, stage, value;
}

inline PyObject *held_in_name, *is_current_name, *lent_name, *may_overwrite_name, *note_run_name, *run_name, *share, *source_name;

// Counting.

// As `UseCounter._begin`.
inline void begin(PyObject* value, PyObject* plan) {
  if (value::plan.number(value) == PyLong_AsLong(plan)) {
    return;
  }
  value::plan.set(value, plan);
  value::uses.set(value, zero);
  value::view_uses.set(value, zero);
  value::reads.set(value, zero);
  value::is_carried.set(value, Py_False);
  if (!value::root.is_none(value)) {
    begin(value::root.of(value), plan);
  }
}

// As `UseCounter._add_use`.
inline void add_use(PyObject* value, PyObject* plan) {
  begin(value, plan);
  add(value::uses, value, 1);
  PyObject* root = value::root.of(value);
  if (root != Py_None) {
    add(value::view_uses, root, 1);
  }
}

// As `UseCounter._count`.
inline void count(PyObject* value, PyObject* plan, std::vector<Ref>& wanted) {
  add_use(value, plan);
  if (value::tensor.is_none(value)) {
    wanted.push_back(Ref::to(value));
  }
}

// As `UseCounter._carry`.
inline void carry(PyObject* value, PyObject* plan) {
  add_use(value, plan);
  value::is_carried.set(value, Py_True);
}

// As `UseCounter._count_held`, of the outputs of one operation.
inline void count_held(PyObject* of, PyObject* outputs, PyObject* held) {
  PyObject* plan = replayer::plan.of(of);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs); ++i) {
    Ref value = Ref::to(PyWeakref_GET_OBJECT(PyList_GET_ITEM(outputs, i)));
    if (value == Py_None || value::operation.is_none(value)) {
      continue;
    }
    PyObject* made_by = value::operation.of(value);
    PyObject* number = operation::call.of(made_by);
    Ref output = Ref::made(PyTuple_Pack(2, number, value::index.of(value)));
    int is_held = PySequence_Contains(held, output);
    check(is_held);
    if (is_held &&
        call(replayer::stages.of(of), is_current_name, replayer::stage.of(of),
             operation::number.of(made_by), number) == Py_True) {
      carry(value, plan);
    }
  }
}

// What a replayer's stage retains for later ones; null without stages.
inline Ref held_of(PyObject* of) {
  long stage = replayer::stage.number(of);
  if (stage < 0) {
    return Ref();
  }
  return call(replayer::stages.of(of), held_in_name, replayer::stage.of(of));
}

inline PyObject *inputs_name;

// As `Operation.inputs`.
inline Ref inputs_of(PyObject* of) {
  PyObject* inputs = operation::inputs.of(of);
  return inputs == Py_None ? call(of, inputs_name) : Ref::to(inputs);
}

inline std::vector<long> begins_of(PyObject* of) {
  PyObject* begins = replayer::begins.of(of);
  std::vector<long> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(begins); ++i) {
    found.push_back(PyLong_AsLong(PyTuple_GET_ITEM(begins, i)));
  }
  return found;
}

// As `UseCounter._is_entry`.
inline bool is_entry(const std::vector<long>& begins, PyObject* read, PyObject* operation) {
  PyObject* made_by = value::operation.of(read);
  if (made_by == Py_None) {
    return false;
  }
  auto turn = [&](PyObject* of) {
    return std::lower_bound(begins.begin(), begins.end(), operation::number.number(of));
  };
  return turn(made_by) != turn(operation);
}

// As `UseCounter._count_path`.
inline PyObject* count_path(PyObject*, PyObject* of) {
  HANDLE_TH_ERRORS
  PyObject* plan = replayer::plan.of(of);
  long stage = replayer::stage.number(of);
  std::vector<long> begins = begins_of(of);
  Ref held = held_of(of);
  std::vector<Ref> wanted;
  PyObject* handles = replayer::handles.of(of);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(handles); ++i) {
    PyObject* handle = PyWeakref_GET_OBJECT(PyList_GET_ITEM(handles, i));
    if (handle != Py_None && !is_held(handle::value.of(handle)) &&
        (stage < 0 || handle::stage.number(handle) == stage)) {
      count(handle::value.of(handle), plan, wanted);
    }
  }
  while (!wanted.empty()) {
    Ref value = std::move(wanted.back());
    wanted.pop_back();
    PyObject* operation = value::operation.of(value);
    if (operation == Py_None ||
        operation::plan.number(operation) == PyLong_AsLong(plan)) {
      continue;
    }
    operation::plan.set(operation, plan);
    bool is_view = operation::is_view.is_true(operation);
    Ref inputs = inputs_of(operation);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE((PyObject*)inputs); ++i) {
      PyObject* input = PyList_GET_ITEM((PyObject*)inputs, i);
      count(input, plan, wanted);
      PyObject* owner = root_of(input);
      if (!begins.empty() && is_entry(begins, owner, operation)) {
        check(PySet_Add(replayer::entries.of(of), owner));
        carry(owner, plan);
      }
      if (!is_view) {
        add(value::reads, root_of(input), 1);
      }
    }
    if (held != nullptr) {
      count_held(of, operation::outputs.of(operation), held);
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// is_read_later(replayer, owner), as `Replayer._is_read_later`.
inline PyObject* is_read_later(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject *of = arguments[0], *owner = arguments[1];
  long stage = replayer::stage.number(of);
  std::vector<Ref> pending;
  PyObject* handles = replayer::handles.of(of);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(handles); ++i) {
    PyObject* handle = PyWeakref_GET_OBJECT(PyList_GET_ITEM(handles, i));
    if (handle != Py_None && handle::stage.number(handle) != stage) {
      pending.push_back(Ref::to(handle::value.of(handle)));
    }
  }
  std::unordered_set<PyObject*> seen;
  while (!pending.empty()) {
    Ref value = std::move(pending.back());
    pending.pop_back();
    PyObject* operation = value::operation.of(value);
    bool is_live = !value::tensor.is_none(value) &&
        value::is_carried.is_true(root_of(value));
    if (operation == Py_None || is_live || !seen.insert(operation).second) {
      continue;
    }
    bool is_view = operation::is_view.is_true(operation);
    Ref inputs = inputs_of(operation);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE((PyObject*)inputs); ++i) {
      PyObject* input = PyList_GET_ITEM((PyObject*)inputs, i);
      if (!is_view && root_of(input) == owner) {
        Py_RETURN_TRUE;
      }
      pending.push_back(Ref::to(input));
    }
  }
  Py_RETURN_FALSE;
  END_HANDLE_TH_ERRORS
}

// As `Replayer._path_to`: the operations in order, and what must be unpacked; false if
// the plan has freed a value that is needed.
inline bool find_path(
    PyObject* of, PyObject* to, std::vector<Ref>& path, std::vector<Ref>& packed) {
  long plan = replayer::plan.number(of);
  std::vector<Ref> wanted = {Ref::to(to)};
  std::unordered_set<PyObject*> seen;
  while (!wanted.empty()) {
    Ref value = std::move(wanted.back());
    wanted.pop_back();
    if (value::plan.number(value) != plan || value::uses.number(value) <= 0) {
      return false;
    }
    PyObject* operation = value::operation.of(value);
    if (operation == Py_None) {
      packed.push_back(value);
    } else if (seen.insert(operation).second) {
      path.push_back(Ref::to(operation));
      Ref inputs = inputs_of(operation);
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE((PyObject*)inputs); ++i) {
        PyObject* input = PyList_GET_ITEM((PyObject*)inputs, i);
        if (value::tensor.is_none(input)) {
          wanted.push_back(Ref::to(input));
        }
      }
    }
  }
  std::sort(path.begin(), path.end(), [](const Ref& one, const Ref& other) {
    return operation::number.number(one) < operation::number.number(other);
  });
  return true;
}

inline Ref listed(const std::vector<Ref>& items) {
  Ref list = Ref::made(PyList_New(0));
  for (const Ref& item : items) {
    check(PyList_Append(list, item));
  }
  return list;
}

// path_to(replayer, value), as `Replayer._path_to`.
inline PyObject* path_to(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  std::vector<Ref> path, packed;
  if (!find_path(arguments[0], arguments[1], path, packed)) {
    Py_RETURN_NONE;
  }
  return PyTuple_Pack(2, (PyObject*)listed(path), (PyObject*)listed(packed));
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
