// Follow a route: each operator and each saved tensor is compared with it.

#pragma once

#include "trip.h"

namespace membudget {

// Skips views that were rebased, which no operator makes.
inline void pass_rebased(Trip& trip, size_t until) {
  while (trip.at < until && trip.route->steps[trip.at].is_rebased()) {
    ++trip.at;
  }
}

// Meeting tensors.

inline void meet(Met& met, const at::Tensor& tensor) {
  met.live.emplace(tensor.getIntrusivePtr());
  met.memory.emplace(tensor.storage().getWeakStorageImpl());
}

inline const c10::StorageImpl* storage_of(const Met& met) {
  return met.memory ? met.memory->_unsafe_get_target() : nullptr;
}

// Whether a tensor is in the memory that the route says. Two tensors in one memory are so
// in every call, and two that are not, in none: what a write destroys depends on it.
inline bool is_in(Trip& trip, size_t memory, const at::Tensor& tensor) {
  auto& known = trip.memories[memory];
  if (known) {
    return known->_unsafe_get_target() == storage_of(tensor);
  }
  known.emplace(tensor.storage().getWeakStorageImpl());
  return trip.numbers.emplace(storage_of(tensor), memory).second;
}

inline bool meet_source(Trip& trip, size_t number, const at::Tensor& tensor) {
  const RouteValue& known = trip.route->values[number];
  Met& met = trip.values[number];
  Ref object = wrapped(tensor);
  if (known.step >= 0 || met.memory || !is_usual_class(object) ||
      tensor.scalar_type() != known.dtype || tensor.device() != known.device ||
      !is_in(trip, known.memory, tensor)) {
    return false;
  }
  meet(met, tensor);
  if (met.needs > 0) {
    met.tensor = is_own_alias(tensor, object) ? tensor : detached(tensor);
  }
  return true;
}

// A view is told by where its elements lie, whoever has made it.
inline bool meet_rebased(Trip& trip, size_t number, const at::Tensor& tensor) {
  const RouteValue& known = trip.route->values[number];
  bool is_there = storage_of(tensor) == storage_of(trip.values[known.root]) &&
      *known.geometry == Geometry::of(tensor);
  if (is_there) {
    meet(trip.values[number], tensor);
  }
  return is_there;
}

// Whether a tensor has the value that the route says, by itself or as an alias that no
// operator made: autograd saves detached ones.
inline bool has_value(Trip& trip, size_t number, const at::Tensor& tensor) {
  Met& met = trip.values[number];
  if (!is_plain(tensor)) {
    return false;
  }
  if (met.live && storage_of(tensor) == storage_of(met)) {
    if (met.live->_unsafe_get_target() == tensor.unsafeGetTensorImpl()) {
      return true;
    }
    auto other = met.live->lock();
    if (other && have_same_geometry(tensor, at::Tensor(std::move(other)))) {
      return true;
    }
  }
  if (is_rebased(*trip.route, number)) {
    return meet_rebased(trip, number, tensor);
  }
  return !met.live && meet_source(trip, number, tensor);
}

// Writes to memory that no replay makes.

// The index of the stand-in for an argument; how many there are if the argument has none.
inline size_t stand_in_at(const Step& step, size_t argument) {
  const auto& all = step.call.stand_ins;
  auto is_for = [&](const StandIn& stand_in) { return stand_in.argument == argument; };
  return std::find_if(all.begin(), all.end(), is_for) - all.begin();
}

// Whether a replay makes the like of an argument.
inline bool is_like(Trip& trip, const Step& step, size_t number, const at::Tensor& tensor) {
  const StandIn& stand_in = step.call.stand_ins[number];
  return tensor.sizes() == stand_in.sizes && tensor.strides() == stand_in.strides &&
      tensor.scalar_type() == c10::typeMetaToScalarType(stand_in.options.dtype()) &&
      tensor.device() == stand_in.options.device() &&
      (stand_in.is_outline ||
       (is_plain(tensor) && is_in(trip, step.stood_in_for[number], tensor)));
}

// Calls `visit(tensor)` for each tensor outside the route that a step overwrites.
template <typename Visit>
void for_each_written(
    const Step& step, const c10::Stack& stack, size_t first, const Visit& visit) {
  if (step.writes_held()) {
    visit(stack[first].toTensor());
  }
  for (const StandIn& stand_in : step.call.stand_ins) {
    if (!stand_in.is_outline) {
      visit(stack[first + stand_in.argument].toTensor());
    }
  }
}

// Calls `visit(met)` for each value in memory that a step is about to overwrite.
template <typename Visit>
void for_each_met_in(Trip& trip, const at::Tensor& written, const Visit& visit) {
  for (Met& met : trip.values) {
    if (storage_of(met) == storage_of(written)) {
      visit(met);
    }
  }
}

// Copies what a step is about to destroy, if a replay needs it (Rule 6).
inline void copy_written(Trip& trip, const Step& step, const c10::Stack& stack, size_t first) {
  for_each_written(step, stack, first, [&](const at::Tensor& written) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for_each_met_in(trip, written, [&](Met& met) {
      met.live.reset();
      if (met.tensor.defined() && !are_apart(met.tensor, written)) {
        met.tensor = copied(met.tensor);
        met.memory.emplace(met.tensor.storage().getWeakStorageImpl());
      }
    });
    auto memory = trip.numbers.find(storage_of(written));
    if (memory == trip.numbers.end() || !trip.route->makes_memory[memory->second]) {
      trip.written.emplace_back(trip.at, written);
    }
  });
}

// Whether autograd has saved all that it saves before the next step. A call that saves
// less, as its parameters need no gradient now, would hold what nobody asks for.
inline bool has_saved_all(const Trip& trip) {
  const auto& saves = trip.route->saves;
  size_t next = trip.stops.size();
  return next == saves.size() || saves[next].after > trip.at;
}

// Whether an operator is the next step, and reads the values that it read.
inline bool is_next(
    Trip& trip, const Operator& known, const c10::Stack& stack, size_t first) {
  pass_rebased(trip, trip.route->steps.size());
  if (trip.at >= trip.route->steps.size() || !has_saved_all(trip)) {
    return false;
  }
  const Step& step = trip.route->steps[trip.at];
  if (step.known != &known || step.grad_enabled != at::GradMode::is_enabled() ||
      trip.dtype != c10::typeMetaToScalarType(at::get_default_dtype()) ||
      (known.is_random && !draws_on_cpu(known, stack, first))) {
    return false;
  }
  if (known.kind == Kind::empty) {
    return true;  // What it makes is compared instead.
  }
  if (!has_arguments(step, stack, first)) {
    return false;
  }
  size_t count = 0;
  bool is_same = true;
  for_each_tensor(known, stack, first, [&](const at::Tensor& tensor, Place place) {
    size_t stand_in = stand_in_at(step, place.argument);
    if (stand_in < step.call.stand_ins.size()) {
      is_same = is_same && is_like(trip, step, stand_in, tensor);
      return;
    }
    is_same = is_same && count < step.call.places.size() &&
        step.call.places[count].argument == place.argument &&
        step.call.places[count].element == place.element &&
        has_value(trip, step.given(count), tensor);
    ++count;
  });
  return is_same && count == step.call.places.size();
}

inline void hold_kept(Trip& trip, size_t number, const at::Tensor& tensor) {
  Met& met = trip.values[number];
  if (is_held(trip, number) && met.needs > 0) {
    met.tensor = detached(tensor);
  }
}

// Notes an output; false if it is not in the memory that the route says.
inline bool meet_output(Trip& trip, size_t number, const at::Tensor& output) {
  if (!output.defined() || !is_plain(output)) {
    return false;
  }
  meet(trip.values[number], output);
  hold_kept(trip, number, output);
  const RouteValue& known = trip.route->values[number];
  return is_in(trip, known.memory, output) &&
      (!known.geometry || *known.geometry == Geometry::of(output));
}

// Whether uninitialised memory has the geometry that the step would give it.
inline bool has_geometry(const Step& step, const at::Tensor& tensor) {
  return tensor.sizes() == step.call.stack[0].toDimVector() &&
      tensor.strides() == step.call.stack[1].toDimVector() &&
      tensor.scalar_type() == step.call.stack[2].toScalarType() &&
      tensor.device() == step.call.stack[4].toDevice();
}

// Notes what a write has made: all of its memory, or the part that is kept.
inline void meet_written(Trip& trip, const Step& step, const at::Tensor& written) {
  size_t number = step.outputs[1];
  if (step.part < 0 || trip.route->values[number].is_kept) {
    meet(trip.values[number], written);
    hold_kept(trip, number, written);
  } else {
    trip.values[number].live = trip.values[step.inputs[0]].live;
    trip.values[number].memory = trip.values[step.inputs[0]].memory;
  }
}

inline bool meet_outputs(
    Trip& trip, const Step& step, const c10::OperatorHandle& target, const c10::Stack& stack) {
  if (step.writes_held()) {
    return true;
  }
  if (step.writes()) {
    meet_written(trip, step, stack.back().toTensor());
    return true;
  }
  if (step.known->kind == Kind::empty && !has_geometry(step, stack.back().toTensor())) {
    return false;
  }
  auto flat = flat_outputs(stack, target.schema().returns().size());
  bool is_usual = flat.size() == step.outputs.size();
  for (size_t i = 0; is_usual && i < flat.size(); ++i) {
    is_usual = step.outputs[i] < 0 || meet_output(trip, step.outputs[i], flat[i]);
  }
  return is_usual;
}

// Runs an operator that is the next step; false if it has made something else.
inline bool take_step(
    Trip& trip, const c10::OperatorHandle& target, c10::DispatchKeySet below, c10::Stack& stack) {
  const Step& step = trip.route->steps[trip.at];
  trip.recent.clear();
  copy_written(trip, step, stack, stack.size() - target.schema().arguments().size());
  {
    DrawLock lock(step.known->is_random);
    if (step.known->is_random) {
      trip.drawn[trip.at] = noted_state();
    }
    WithoutGil released(!step.is_view);
    target.redispatchBoxed(below, &stack);
  }
  ++trip.at;
  return meet_outputs(trip, step, target, stack);
}

// The placeholder of a tensor that autograd saves; null if the route has another one.
inline Ref stop_at(PyObject* box, PyObject* object) {
  Trip& trip = TripBox::of(box);
  size_t number = trip.stops.size();
  const Route& route = *trip.route;
  if (number < route.saves.size()) {
    pass_rebased(trip, route.saves[number].after);
  }
  if (number >= route.saves.size() || route.saves[number].after != trip.at ||
      !is_usual_class(object) ||
      !has_value(trip, route.saves[number].value, THPVariable_Unpack(object))) {
    return Ref();
  }
  Ref made = StopBox::make(Ref::to(box), number);
  trip.stops.push_back(&StopBox::of(made));
  trip.recent.emplace_back(number, Ref::to(object));
  return made;
}

} // namespace membudget
