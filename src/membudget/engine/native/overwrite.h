// Replay writes from a route: in place where nothing else needs what they overwrite.
//
//   memory         step                         values
//   sum0  sum1     addmm                        sums, and its parts
//   gate0 sum1     sigmoid_ (part 0 of sums)    sums', of which part 0 is viewed again
//   gate0 gate1    sigmoid_ (part 1 of sums')   sums'', of which part 1 is viewed again
//
// As on the tape, each write gives the memory a new value. The values share it, at one *place*,
// until a write would destroy what is still needed: that write works on a copy.

#pragma once

#include "plan.h"

namespace membudget {

inline void run_step(Trip& trip, size_t number);

// As `derived`: the part of memory that a step overwrites.
inline at::Tensor part_of(const Route& route, const Step& step, const at::Tensor& memory) {
  if (step.part < 0) {
    return memory;
  }
  const Geometry& part = *route.values[step.part].geometry;
  return memory.as_strided(part.sizes, part.strides, part.offset);
}

// As `Executor._is_made`: whether views were made early, for a write to their memory.
inline bool is_made(const Trip& trip, const Step& step) {
  return std::all_of(step.outputs.begin(), step.outputs.end(), [&](long output) {
    return output < 0 || trip.values[output].uses <= 0 || trip.values[output].tensor.defined();
  });
}

// As `Executor._make_views`.
inline void make_views(Trip& trip, size_t owner) {
  for (size_t view : trip.route->views[owner]) {
    if (trip.values[view].uses > 0 && !trip.values[view].tensor.defined()) {
      run_step(trip, trip.route->values[view].step);
    }
  }
}

// As `leaves_views`.
inline bool leaves_views(const Trip& trip, const Step& step) {
  size_t owner = step.inputs[0];
  auto written = step.part < 0 ? Geometry::of(trip.values[owner].tensor)
                               : *trip.route->values[step.part].geometry;
  bool leaves = true;
  for_each_sharing(trip, owner, [&](size_t other) {
    for (size_t view : trip.route->views[other]) {
      const at::Tensor& tensor = trip.values[view].tensor;
      leaves = leaves && (!tensor.defined() || are_apart(Geometry::of(tensor), written));
    }
  });
  return leaves;
}

// As `_may_overwrite`.
inline bool may_overwrite(Trip& trip, const Step& step) {
  size_t owner = step.inputs[0];
  const Met& met = trip.values[owner];
  if (is_held(trip, owner)) {
    return false;
  }
  if (met.memory_uses <= 1 && met.place == owner) {
    return true;
  }
  make_views(trip, owner);
  return met.uses <= 1 && leaves_views(trip, step);
}

// The memory that a step overwrites, or a copy if anything else needs it.
inline at::Tensor writable(Trip& trip, const Step& step) {
  const at::Tensor& tensor = trip.values[step.inputs[0]].tensor;
  return may_overwrite(trip, step) ? tensor : copied(tensor);
}

// Where the memory is that a step has made: where it was, after a write in place.
inline size_t place_of(
    const Trip& trip, const Step& step, size_t output, const at::Tensor& made) {
  if (!step.writes()) {
    return output;
  }
  const Met& before = trip.values[step.inputs[0]];
  return before.tensor.is_same(made) ? before.place : output;
}

} // namespace membudget
