// Meet tensors on a route: which value each has, and which memory it is in.

#pragma once

#include "trip.h"

namespace membudget {

// Skips views that were rebased, which no operator makes.
inline void pass_rebased(Trip& trip, size_t until) {
  while (trip.at < until && trip.route->steps[trip.at].is_rebased()) {
    ++trip.at;
  }
}

inline void meet(Trip& trip, size_t number, const at::Tensor& tensor) {
  Met& met = trip.values[number];
  met.live.emplace(tensor.getIntrusivePtr());
  met.memory.emplace(tensor.storage().getWeakStorageImpl());
  trip.latest.push_back(number);
}

// Whether a tensor is in the memory that the route says. Two tensors in one memory are so
// in every call, and two that are not, in none: what a write destroys depends on it.
inline bool is_in(Trip& trip, size_t memory, const at::Tensor& tensor) {
  auto& known = trip.memories[memory];
  if (known) {
    return known->_unsafe_get_target() == storage_of(tensor);
  }
  bool is_new = trip.numbers.emplace(storage_of(tensor), memory).second;
  if (is_new) {
    known.emplace(tensor.storage().getWeakStorageImpl());
    trip.latest_memories.push_back(memory);
  }
  return is_new;
}

inline bool has_geometry(const RouteValue& known, const at::Tensor& tensor) {
  return !known.geometry || *known.geometry == Geometry::of(tensor);
}

inline bool meet_source(Trip& trip, size_t number, const at::Tensor& tensor) {
  const RouteValue& known = trip.route->values[number];
  Met& met = trip.values[number];
  Ref object = wrapped(tensor);
  if (known.step >= 0 || met.memory || !is_usual_class(object) ||
      tensor.scalar_type() != known.dtype || tensor.device() != known.device ||
      !has_geometry(known, tensor) || !is_in(trip, known.memory, tensor)) {
    return false;
  }
  meet(trip, number, tensor);
  if (met.needs > 0) {
    met.tensor = alias_of(tensor, object);
  }
  return true;
}

// A view is told by where its elements lie, whoever has made it.
inline bool meet_rebased(Trip& trip, size_t number, const at::Tensor& tensor) {
  const RouteValue& known = trip.route->values[number];
  bool is_there = storage_of(tensor) == storage_of(trip.values[known.root]) &&
      *known.geometry == Geometry::of(tensor);
  if (is_there) {
    meet(trip, number, tensor);
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

} // namespace membudget
