// Follow a route: each operator and each saved tensor is compared with it.

#pragma once

#include "fork.h"
#include "meet.h"

namespace membudget {

// Writes to memory that no replay makes.

// The index of the stand-in for an argument; how many there are if the argument has none.
inline size_t stand_in_at(const Step& step, size_t argument) {
  const auto& all = step.call.stand_ins;
  auto is_for = [&](const StandIn& stand_in) { return stand_in.argument == argument; };
  return std::find_if(all.begin(), all.end(), is_for) - all.begin();
}

inline StandIn stand_in_for(const StandIn& known, const at::Tensor& tensor) {
  return {known.argument, tensor.sizes().vec(), tensor.strides().vec(), tensor.options(),
          known.is_outline};
}

// How the like of an argument that a replay makes compares with it.
inline Alike is_like(Trip& trip, const Step& step, size_t number, const at::Tensor& tensor) {
  const StandIn& known = step.call.stand_ins[number];
  bool is_there = known.is_outline ||
      (is_plain(tensor) && is_in(trip, step.stood_in_for[number], tensor));
  return is_there ? compared(known, stand_in_for(known, tensor)) : Alike::no;
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
    Overwritten noted{trip.at, {Weak(written.getIntrusivePtr())}};
    for_each_met_in(trip, written, [&](Met& met) {
      if (met.live) {
        noted.tensors.push_back(std::move(*met.live));
        met.live.reset();
      }
      if (met.tensor.defined() && !are_apart(met.tensor, written)) {
        met.tensor = copied(met.tensor);
        met.memory.emplace(met.tensor.storage().getWeakStorageImpl());
      }
    });
    auto memory = trip.numbers.find(storage_of(written));
    if (memory == trip.numbers.end() || !trip.route->makes_memory[memory->second]) {
      trip.written.push_back(std::move(noted));
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

// The call of a step, with the numbers of this one.
inline Call own_call(const Step& step, const c10::Stack& stack, size_t first) {
  std::vector<StandIn> stand_ins;
  for (const StandIn& known : step.call.stand_ins) {
    stand_ins.push_back(stand_in_for(known, stack[first + known.argument].toTensor()));
  }
  Call made{step.call.target, without_tensors(stack, first, step.call.places, stand_ins),
            step.call.places, stand_ins};
  for (size_t i = 0; i < made.stack.size(); ++i) {
    if (step.call.stack[i].isDevice()) {
      made.stack[i] = step.call.stack[i];
    }
  }
  return made;
}

// How the tensors of a call compare with those that the step read.
inline Alike compared_tensors(
    Trip& trip, const Step& step, const c10::Stack& stack, size_t first) {
  size_t count = 0;
  Alike found = Alike::same;
  for_each_tensor(*step.known, stack, first, [&](const at::Tensor& tensor, Place place) {
    size_t stand_in = stand_in_at(step, place.argument);
    if (found != Alike::no && stand_in < step.call.stand_ins.size()) {
      found = worse(found, is_like(trip, step, stand_in, tensor));
      return;
    }
    bool is_same = found != Alike::no && count < step.call.places.size() &&
        step.call.places[count] == place &&
        has_value(trip, step.given(count), tensor);
    found = is_same ? found : Alike::no;
    ++count;
  });
  return count == step.call.places.size() ? found : Alike::no;
}

// Whether an operator is the next step, and reads the values that it read.
inline bool is_next(
    Trip& trip, const Operator& known, const c10::Stack& stack, size_t first) {
  pass_rebased(trip, trip.route->steps.size());
  trip.own.erase(trip.at);  // Of a call that has failed, or on another route.
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
  Alike found = compared(step, stack, first);
  found = found == Alike::no ? found : worse(found, compared_tensors(trip, step, stack, first));
  if (found == Alike::but_for_numbers && !trip.route->reads_sizes) {
    trip.own.insert_or_assign(trip.at, own_call(step, stack, first));
    return true;
  }
  return found == Alike::same;
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
  meet(trip, number, output);
  hold_kept(trip, number, output);
  const RouteValue& known = trip.route->values[number];
  return is_in(trip, known.memory, output) && has_geometry(known, output);
}

// Notes what a write has made: all of its memory, or the part that is kept.
inline void meet_written(Trip& trip, const Step& step, const at::Tensor& written) {
  size_t number = step.outputs[1];
  if (step.part < 0 || trip.route->values[number].is_kept) {
    meet(trip, number, written);
    hold_kept(trip, number, written);
  } else {
    trip.values[number].live = trip.values[step.inputs[0]].live;
    trip.values[number].memory = trip.values[step.inputs[0]].memory;
  }
}

// Whether uninitialised memory is as the step would make it, but for its size.
inline bool meet_empty(Trip& trip, const Step& step, const at::Tensor& tensor) {
  const auto& known = step.call.stack;
  bool is_same = tensor.sizes() == known[0].toDimVector() &&
      tensor.strides() == known[1].toDimVector();
  if (tensor.scalar_type() != known[2].toScalarType() || tensor.device() != known[4].toDevice() ||
      (!is_same && trip.route->reads_sizes)) {
    return false;
  }
  trip.own.erase(trip.at);  // On another route.
  if (!is_same) {
    Call made = step.call;
    made.stack[0] = tensor.sizes().vec();
    made.stack[1] = tensor.strides().vec();
    trip.own.insert_or_assign(trip.at, std::move(made));
  }
  return true;
}

// Notes what the next step has made; false if that is something else.
inline bool meet_outputs(Trip& trip, size_t returns, const c10::Stack& stack) {
  const Step& step = trip.route->steps[trip.at];
  if (step.writes_held()) {
    return true;
  }
  if (step.writes()) {
    meet_written(trip, step, stack.back().toTensor());
    return true;
  }
  if (step.known->kind == Kind::empty && !meet_empty(trip, step, stack.back().toTensor())) {
    return false;
  }
  auto flat = flat_outputs(stack, returns);
  bool is_usual = flat.size() == step.outputs.size();
  for (size_t i = 0; is_usual && i < flat.size(); ++i) {
    is_usual = step.outputs[i] < 0 || meet_output(trip, step.outputs[i], flat[i]);
  }
  return is_usual;
}

// Runs an operator that is the next step; false if it has made what no route says.
inline bool take_step(
    Trip& trip, PyObject* recording, const c10::OperatorHandle& target,
    c10::DispatchKeySet below, c10::Stack& stack) {
  const auto route = trip.route;
  const Step& step = route->steps[trip.at];
  trip.recent.clear();
  copy_written(trip, step, stack, stack.size() - target.schema().arguments().size());
  {
    DrawLock lock(step.known->is_random);
    trip.drawn[trip.at] = step.known->is_random ? noted_state() : Ref();
    WithoutGil released(!step.is_view);
    target.redispatchBoxed(below, &stack);
  }
  size_t returns = target.schema().returns().size();
  bool is_known =
      goes_on(trip, recording, true, [&] { return meet_outputs(trip, returns, stack); });
  trip.at += is_known;
  return is_known;
}

// Whether a tensor is the next that the route has saved.
inline bool is_saved_next(Trip& trip, PyObject* object) {
  size_t number = trip.stops.size();
  const Route& route = *trip.route;
  if (number < route.saves.size()) {
    pass_rebased(trip, route.saves[number].after);
  }
  return number < route.saves.size() && route.saves[number].after == trip.at &&
      has_value(trip, route.saves[number].value, THPVariable_Unpack(object));
}

// The placeholder of a tensor that autograd saves; null if no route has it.
inline Ref stop_at(PyObject* recording, PyObject* object) {
  PyObject* box = recording::trip.of(recording);
  Trip& trip = TripBox::of(box);
  if (!is_usual_class(object) ||
      !goes_on(trip, recording, false, [&] { return is_saved_next(trip, object); })) {
    return Ref();
  }
  Ref made = StopBox::make(Ref::to(box), trip.stops.size());
  trip.recent.emplace_back(trip.stops.size(), Ref::to(object));
  trip.stops.push_back(&StopBox::of(made));
  return made;
}

} // namespace membudget
