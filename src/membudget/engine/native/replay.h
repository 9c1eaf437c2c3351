// Plan and run a replay: the common paths of `Replayer` and `Executor`.
//
// Python runs what was recorded in Python (custom operators, several writes at once),
// checks sources that look changed, and divides backward passes into stages.

#pragma once

#include <algorithm>
#include <unordered_set>

#include "tracking.h"

namespace membudget {

inline Class replayer_class;
namespace replayer {
inline Slot enter, handles, memoised, plan, plan_ran, stage, stages, stream, task;
}

inline Class handle_class;
namespace handle {
inline Slot fingerprint, saved_version, served, stage, value;
}

inline PyObject *copy_of, *lent_name, *may_overwrite_name, *run_name, *share, *source_name;

// Counting.

// As `Replayer._begin`.
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

// As `Replayer._count`.
inline void count(PyObject* value, PyObject* plan, std::vector<Ref>& wanted) {
  begin(value, plan);
  add(value::uses, value, 1);
  if (value::tensor.is_none(value)) {
    wanted.push_back(Ref::to(value));
  }
  PyObject* root = value::root.of(value);
  if (root != Py_None) {
    add(value::view_uses, root, 1);
  }
}

inline PyObject *inputs_name;

// As `Operation.inputs`.
inline Ref inputs_of(PyObject* of) {
  PyObject* inputs = operation::inputs.of(of);
  return inputs == Py_None ? call(of, inputs_name) : Ref::to(inputs);
}

// As `Replayer._count_path`, of a backward pass without stages.
inline PyObject* count_path(PyObject*, PyObject* of) {
  HANDLE_TH_ERRORS
  PyObject* plan = replayer::plan.of(of);
  std::vector<Ref> wanted;
  PyObject* handles = replayer::handles.of(of);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(handles); ++i) {
    PyObject* handle = PyWeakref_GET_OBJECT(PyList_GET_ITEM(handles, i));
    if (handle != Py_None && !is_held(handle::value.of(handle))) {
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
      if (!is_view) {
        add(value::reads, root_of(input), 1);
      }
    }
  }
  Py_RETURN_NONE;
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
