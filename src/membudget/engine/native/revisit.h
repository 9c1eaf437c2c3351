// Replay from a route: as `replay.h` and `execute.h` do from a tape.

#pragma once

#include "execute.h"
#include "leave.h"
#include "overwrite.h"

namespace torch::autograd {
// From a header that would take seconds to compile.
TORCH_API int get_current_graph_task_id();
} // namespace torch::autograd

namespace membudget {

// Whether a held tensor is what it was at the end of the forward.
inline bool is_unchanged(const Met& met) {
  const at::Tensor& tensor = met.tensor;
  return is_plain(tensor) && tensor.storage().nbytes() > 0 &&
      static_cast<long>(tensor._version()) == met.version;
}

// A read by a replay; autograd itself reads what `.data =` has put in a tensor.
inline bool is_unchanged_source(const Met& met) {
  return is_unchanged(met) && storage_of(met.tensor) == storage_of(met);
}

inline void use(Trip& trip, size_t number) {
  add_use(trip, number, -1);
  if (trip.values[number].uses <= 0 && !is_held(trip, number)) {
    trip.values[number].tensor.reset();
  }
}

// The steps that make a value, in order; nothing if one of them cannot run.
inline std::vector<size_t> steps_to(Trip& trip, size_t value) {
  std::vector<size_t> wanted = {value}, steps;
  std::vector<bool> seen(trip.steps.size());
  while (!wanted.empty()) {
    size_t number = wanted.back();
    wanted.pop_back();
    const Met& met = trip.values[number];
    if (is_held(trip, number) ? !is_unchanged_source(met) : met.uses <= 0) {
      return {};
    }
    if (met.tensor.defined()) {
      continue;
    }
    size_t step = trip.route->values[number].step;
    if (seen[step]) {
      continue;
    }
    seen[step] = true;
    steps.push_back(step);
    const auto& inputs = trip.route->steps[step].inputs;
    wanted.insert(wanted.end(), inputs.begin(), inputs.end());
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

inline void run_step(Trip& trip, size_t number) {
  const Step& step = trip.route->steps[number];
  if (step.is_view && is_made(trip, step)) {
    return;
  }
  at::Tensor written = step.writes() ? writable(trip, step) : at::Tensor();
  c10::Stack stack = filled(call_of(trip, number), [&](size_t i) {
    bool is_target = i == 0 && step.writes();
    return is_target ? part_of(*trip.route, step, written) : trip.values[step.inputs[i]].tensor;
  });
  {
    Redraw redraw(trip.drawn[number] == nullptr ? Py_None : (PyObject*)trip.drawn[number]);
    at::GradMode::set_enabled(step.grad_enabled);
    WithoutGil released(!step.is_view);
    step.call.target.callBoxed(&stack);
  }
  auto flat = flat_outputs(stack, stack.size());
  stack.clear();
  if (step.writes()) {
    flat = {at::Tensor(), std::move(written)};
  }
  for (size_t i = 0; i < flat.size(); ++i) {
    long output = step.outputs[i];
    if (output >= 0 && !is_held(trip, output) && trip.values[output].uses > 0) {
      trip.values[output].place = place_of(trip, step, output, flat[i]);
      trip.values[output].tensor = std::move(flat[i]);
    }
  }
  flat.clear();
  for (size_t input : step.inputs) {
    trip.values[root_of(*trip.route, input)].reads -= !step.is_view;
    use(trip, input);
  }
}

// Whether a value's memory lives already, so that only views are to be made.
inline bool is_view_of_made(const Trip& trip, size_t value) {
  long root = trip.route->values[value].root;
  return root >= 0 && trip.values[root].tensor.defined();
}

// As `materialise`; false, with nothing done, if Python must.
inline bool recompute(Trip& trip, size_t value) {
  std::vector<size_t> steps = steps_to(trip, value);
  if (steps.empty() || c10::typeMetaToScalarType(at::get_default_dtype()) != trip.dtype) {
    return false;
  }
  run_below_autograd(trip.replayer, is_view_of_made(trip, value), [&] {
    c10::AutoGradMode restored(at::GradMode::is_enabled());
    for (size_t step : steps) {
      run_step(trip, step);
    }
  });
  return true;
}

inline void release_recomputed(Trip& trip) {
  forget_recomputed(trip);
  trip.task = -2;  // Makes the next request count uses anew.
}

inline bool recompute_or_release(Trip& trip, size_t value) {
  try {
    return recompute(trip, value);
  } catch (...) {
    release_recomputed(trip);
    throw;
  }
}

// As `taken`; null if Python must.
inline Ref revisited(PyObject* frame, Stop& stop) {
  Trip& trip = TripBox::of(stop.trip);
  size_t number = trip.route->saves[stop.number].value;
  Met& met = trip.values[number];
  if (is_held(trip, number)) {
    return is_unchanged(met) ? wrapped(met.tensor) : Ref();
  }
  long task = torch::autograd::get_current_graph_task_id();
  long stage = trip.route->saves[stop.number].stage;
  bool is_planned = task == trip.task && stage == trip.stage;
  if (task < 0 || (is_planned && stop.served == trip.plan)) {
    return Ref();
  }
  if (!is_planned) {
    plan_for(trip, task, stage);
  }
  bool is_first = !met.tensor.defined() && !trip.has_run;
  if (!met.tensor.defined() && !recompute_or_release(trip, number)) {
    return Ref();
  }
  trip.has_run |= is_first;
  Ref tensor = wrapped(met.tensor);
  stop.served = trip.plan;
  use(trip, number);
  if (is_first) {
    call(frame, note_run_name);
  }
  return is_lent_as_copy(trip, number) ? copied(tensor) : tensor;
}

// release(trip): as `Replayer.release`.
inline PyObject* release_trip(PyObject*, PyObject* box) {
  HANDLE_TH_ERRORS
  release_recomputed(TripBox::of(box));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
