// Plans of replays from a route: what one backward pass, or one stage of it, needs.

#pragma once

#include "trip.h"

namespace membudget {

inline void forget_recomputed(Trip& trip) {
  for (size_t i = 0; i < trip.values.size(); ++i) {
    if (!is_held(trip, i)) {
      trip.values[i].tensor.reset();
    }
  }
}

inline void add_use(Trip& trip, size_t number, int count) {
  trip.values[number].uses += count;
  trip.values[root_of(*trip.route, number)].memory_uses += count;
}

// As `sharing`: calls `visit(other)` for each value that owns the memory that `owner` owns.
template <typename Visit>
void for_each_sharing(const Trip& trip, size_t owner, const Visit& visit) {
  for (size_t other : trip.route->owners[trip.route->values[owner].memory]) {
    if (trip.values[other].place == trip.values[owner].place) {
      visit(other);
    }
  }
}

// Counts what will use each value in a plan, as in Python.
class UseCounter {
 public:
  explicit UseCounter(Trip& trip) : trip_(trip), route_(*trip.route), is_run_(trip.steps.size()) {
    for (Met& met : trip_.values) {
      met.uses = met.memory_uses = met.reads = 0;
      met.is_carried = false;
    }
  }

  void count() {
    for (const Stop* stop : trip_.stops) {
      if (stop != nullptr && route_.saves[stop->number].stage == trip_.stage) {
        use(route_.saves[stop->number].value);
      }
    }
    while (!wanted_.empty()) {
      size_t step = route_.values[wanted_.back()].step;
      wanted_.pop_back();
      if (!is_run_[step]) {
        is_run_[step] = true;
        count_step(step);
      }
    }
    for (size_t i = 0; i < trip_.values.size(); ++i) {
      if (!is_held(trip_, i) && trip_.values[i].tensor.defined()) {
        carry_retained(i);  // From an earlier stage.
      }
    }
    for (size_t value : trip_.entries) {
      if (trip_.values[value].tensor.defined() && !trip_.values[value].is_carried) {
        carry(value);
      }
    }
  }

 private:
  void use(size_t number) {
    const Met& met = trip_.values[number];
    add_use(trip_, number, 1);
    if (!is_held(trip_, number) && !met.tensor.defined()) {
      wanted_.push_back(number);
    }
  }

  void count_step(size_t number) {
    const Step& step = route_.steps[number];
    for (size_t input : step.inputs) {
      use(input);
      long owner = root_of(route_, input);
      trip_.values[owner].reads += !step.is_view;
      if (is_entry(owner, number)) {
        trip_.entries.insert(owner);  // Stages of the turn go on from there.
        carry(owner);
      }
    }
    for (long output : step.outputs) {
      if (output >= 0) {
        carry_retained(output);
      }
    }
  }

  // Whether a step reads what was made before its turn.
  bool is_entry(size_t read, size_t step) const {
    auto turn = [&](size_t step) { return std::min(turn_of(route_, step), trip_.turn); };
    return trip_.turn > 0 && !is_held(trip_, read) &&
        turn(route_.values[read].step) != turn(step);
  }

  void carry_retained(size_t number) {
    if (trip_.values[number].needs > 0 && route_.retains(trip_.stage, number)) {
      carry(number);
    }
  }

  void carry(size_t number) {
    add_use(trip_, number, 1);
    trip_.values[number].is_carried = true;
  }

  Trip& trip_;
  const Route& route_;
  std::vector<bool> is_run_;  // The steps of the plan.
  std::vector<size_t> wanted_;
};

// Begins a turn, and forgets what only later ones read of those before.
inline void enter_turn(Trip& trip) {
  const Route& route = *trip.route;
  size_t turn = trip.stage < 0 ? 0 : trip.stage / route.stages;
  if (turn != trip.turn) {
    trip.turn = turn;
    size_t begin = turn == 0 ? 0 : route.turns[turn - 1];
    for (auto entry = trip.entries.begin(); entry != trip.entries.end();) {
      bool is_before = static_cast<size_t>(route.values[*entry].step) < begin;
      entry = is_before ? std::next(entry) : trip.entries.erase(entry);
    }
  }
}

// Begins a backward pass, or a stage of it, which finds what others have retained.
inline void plan_for(Trip& trip, long task, long stage) {
  if (task != trip.task) {
    forget_recomputed(trip);
    trip.entries.clear();
    trip.has_run = false;
  }
  ++trip.plan;
  trip.task = task;
  trip.stage = stage;
  enter_turn(trip);
  UseCounter(trip).count();
  for (size_t i = 0; i < trip.values.size(); ++i) {
    if (!is_held(trip, i) && trip.values[i].uses == 0) {
      trip.values[i].tensor.reset();
    }
  }
}

// As `is_read_later`: whether another stage may read memory that this one retains.
inline bool may_be_read_later(const Trip& trip, long owner) {
  const Route& route = *trip.route;
  std::vector<size_t> pending;
  std::vector<bool> seen(trip.steps.size());
  for (const Stop* stop : trip.stops) {
    if (stop != nullptr && route.saves[stop->number].stage != trip.stage) {
      pending.push_back(route.saves[stop->number].value);
    }
  }
  while (!pending.empty()) {
    size_t number = pending.back();
    pending.pop_back();
    long step = route.values[number].step;
    bool is_live = trip.values[number].tensor.defined() &&
        trip.values[root_of(route, number)].is_carried;
    if (is_held(trip, number) || is_live || seen[step]) {
      continue;
    }
    seen[step] = true;
    for (size_t input : route.steps[step].inputs) {
      if (!route.steps[step].is_view && root_of(route, input) == owner) {
        return true;
      }
      pending.push_back(input);
    }
  }
  return false;
}

// As `_is_still_read`.
inline bool is_still_read(const Trip& trip, long owner) {
  const Met& met = trip.values[owner];
  return met.reads > 0 || (met.is_carried && may_be_read_later(trip, owner));
}

// Whether the memory of a value that autograd gets, and may overwrite, is read later.
inline bool is_lent_as_copy(const Trip& trip, size_t value) {
  long owner = root_of(*trip.route, value);
  if (is_held(trip, owner)) {
    return false;
  }
  bool is_read = is_still_read(trip, owner);
  for_each_sharing(trip, owner, [&](size_t other) {
    is_read = is_read || is_still_read(trip, other);
  });
  return is_read;
}

} // namespace membudget
