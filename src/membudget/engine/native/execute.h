// Run recorded operators again: the common paths of `Executor`.

#pragma once

#include <ATen/Parallel.h>

#include "conditions.h"
#include "draws.h"
#include "operands.h"

namespace membudget {

// Notes the new content of memory that an operator wrote, as `Executor._note`.
inline void note_written(PyObject* operation, PyObject* value, const Ref& written) {
  value::tensor.set(value, written);
  PyObject* root = PyList_GET_ITEM(operation::inputs.of(operation), 0);
  if (!value::sharing.is_none(root) && value::tensor.of(root) == written) {
    Ref::made(PyObject_CallFunctionObjArgs(share, root, value, nullptr));
  }
}

// As `Executor._note`; `written` is the memory that the operator wrote, if any.
inline void note(
    PyObject* of, PyObject* operation, const c10::Stack& stack, const Ref& written) {
  auto flat = flat_outputs(stack, stack.size());
  long plan = replayer::plan.number(of);
  PyObject* outputs = operation::outputs.of(operation);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs); ++i) {
    Ref value = Ref::to(PyWeakref_GET_OBJECT(PyList_GET_ITEM(outputs, i)));
    // An output that became a source keeps its content.
    if (value != Py_None && value::operation.of(value) == operation &&
        value::plan.number(value) == plan && value::uses.number(value) > 0) {
      check(PyDict_SetItem(replayer::memoised.of(of), value, Py_None));
      if (written != nullptr) {
        note_written(operation, value, written);
      } else {
        value::tensor.set(value, wrapped(flat[value::index.number(value)]));
      }
    }
  }
}

// As `Executor._is_made`.
inline bool is_made(PyObject* of, PyObject* operation) {
  long plan = replayer::plan.number(of);
  PyObject* outputs = operation::outputs.of(operation);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs); ++i) {
    PyObject* value = PyWeakref_GET_OBJECT(PyList_GET_ITEM(outputs, i));
    if (value != Py_None && value::operation.of(value) == operation &&
        value::plan.number(value) == plan && value::uses.number(value) > 0 &&
        value::tensor.is_none(value)) {
      return false;
    }
  }
  return true;
}

// As `Executor._run`.
inline void run(PyObject* of, PyObject* operation) {
  if (operation::native.is_none(operation)) {
    call(of, run_name, operation);
    return;
  }
  bool is_view = operation::is_view.is_true(operation);
  if (is_view && is_made(of, operation)) {
    return;  // Run early, for a write to what it is a view of.
  }
  PyObject* inputs = operation::inputs.of(operation);
  Ref written;
  if (operation::targets.of(operation) != no_targets) {
    written = writable_copy(of, operation, PyList_GET_ITEM(inputs, 0));
  }
  c10::Stack stack = arguments(of, operation, written);
  {
    Redraw redraw(operation::drawn.of(operation));
    WithoutGil released(!is_view);
    CallBox::of(operation::native.of(operation)).target.callBoxed(&stack);
  }
  note(of, operation, stack, written);
  stack.clear();
  written = Ref();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); ++i) {
    PyObject* input = PyList_GET_ITEM(inputs, i);
    if (!is_view) {
      add(value::reads, root_of(input), -1);
    }
    used(of, input);
  }
}

inline void run_path(PyObject* of, const std::vector<Ref>& path) {
  c10::AutoGradMode restored(at::GradMode::is_enabled());
  for (const Ref& operation : path) {
    at::GradMode::set_enabled(operation::grad_enabled.is_true(operation));
    run(of, operation);
  }
}

// run_all(replayer, operations), as `Replayer._run_all`.
inline PyObject* run_all(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  std::vector<Ref> path;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments[1]); ++i) {
    path.push_back(Ref::to(PyList_GET_ITEM(arguments[1], i)));
  }
  run_path(arguments[0], path);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Whether an operation ran on the stream of the region, and all that it reads was made
// there.
inline bool is_on_one_stream(PyObject* operation) {
  if (!operation::stream.is_none(operation)) {
    return false;
  }
  Ref inputs = inputs_of(operation);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE((PyObject*)inputs); ++i) {
    PyObject* made_by = value::operation.of(root_of(PyList_GET_ITEM((PyObject*)inputs, i)));
    if (made_by != Py_None && !operation::stream.is_none(made_by)) {
      return false;
    }
  }
  return true;
}

// Runs operators again under the settings of the forward. Views compute nothing, so that
// no setting matters to them.
template <typename Run>
void run_below_autograd(PyObject* of, bool are_views, const Run& run) {
  // A new thread would use all cores for matrix products until it has asked once.
  at::get_num_threads();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (are_views) {
    run();
    return;
  }
  {
    Isolated isolated;
    c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    Entered settings(of);
    run();
  }
  if (PyErr_Occurred()) {  // In leaving what was entered.
    throw_python_error();
  }
}

// As `Replayer._materialise`, but for the count; false, with nothing done, if Python must.
inline bool materialise(PyObject* of, PyObject* value) {
  if (value::operation.is_none(value)) {
    return false;
  }
  std::vector<Ref> path, packed;
  if (!find_path(of, value, path, packed) || !packed.empty()) {
    return false;
  }
  PyObject* dtype =
      python_dtype(c10::typeMetaToScalarType(at::get_default_dtype()));
  bool has_streams = !replayer::stream.is_none(of);
  for (const Ref& operation : path) {
    if (operation::default_dtype.of(operation) != dtype ||
        (has_streams && !is_on_one_stream(operation))) {
      return false;
    }
  }
  PyObject* root = value::root.of(value);
  bool is_view = root != Py_None && !value::tensor.is_none(root);
  run_below_autograd(of, is_view, [&] { run_path(of, path); });
  return true;
}

// materialise(replayer, value)
inline PyObject* materialise_value(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(materialise(arguments[0], arguments[1]));
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
