// Routes: how a verified call went, operator by operator, without its tensors.
//
//   path     addmm   gelu   addmm            the operators, which Python knows
//   steps    each with its arguments, and which values these were
//   values   x W b   h = addmm(b, x, W)   g = gelu(h)   ...
//   memories 0 1 2   3                   4   which values share one
//   saves    x W h g ...                     what autograd saved, and after which step
//
// A later call is a *trip* if its operators read the same values: it writes no tape, for the
// route is its tape. `survey.h` draws up a route, `follow.h` follows one, `fork.h` goes on
// along another one where two part, `revisit.h` replays from one, and `leave.h` writes the
// tape of a call that takes another turn, as if it had been recorded from its start.

#pragma once

#include "geometry.h"
#include "observe.h"

#include <memory>
#include <optional>

namespace membudget {

// One operator call. As on the tape, uninitialised memory is made by `empty_strided`,
// whatever `known` is, and what was a view of memory before a write is *rebased*: viewed
// again by a step that no operator takes.
struct Step {
  const Operator* known;  // Null for a view that is rebased.
  PyObject* overload;  // Borrowed: nothing frees an overload.
  Call call;
  std::vector<size_t> inputs;  // The values that it reads,
  std::vector<long> outputs;  // and makes; -1 for an output that is none.
  bool grad_enabled = false;
  bool is_view = false;
  long kept = 0;  // How many outputs the policy kept.
  std::vector<size_t> stood_in_for = {};  // The memory of each argument with a stand-in.
  long number = 0;  // Of the operator among those of the call, or of the latest one,
  long place = 0;  // and for the policy.
  long part = -1;  // The view of input 0 that it overwrites; -1 if all of it.

  bool is_rebased() const { return known == nullptr; }

  bool is_in_place() const { return !is_rebased() && known->writes_first(); }

  // Whether it overwrites what a replay makes: input 0, which is output 1 from then on.
  bool writes() const { return is_in_place() && !outputs.empty(); }

  // Whether it overwrites memory that no replay makes, and is not to be run again.
  bool writes_held() const { return is_in_place() && outputs.empty(); }

  // The value that the operator got as a tensor.
  size_t given(size_t input) const { return input == 0 && part >= 0 ? part : inputs[input]; }
};

// What one tensor holds; a value of no step comes from outside the region.
struct RouteValue {
  long step = -1;
  long root = -1;  // The value that owns the memory; -1 for the value itself.
  bool is_kept = false;
  size_t memory = 0;  // The number of its memory: which tensors alias is part of a route.
  // Compared for values from outside only: those of all others follow.
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::Device device = c10::kCPU;
  // Of memory that is viewed again, and of its parts; of all values if the policy reads sizes.
  std::optional<Geometry> geometry = {};

  bool is_held() const { return step < 0 || is_kept; }
};

struct Save {
  size_t value;
  size_t after;  // How many steps had run.
  long stage;  // Which stage of the backward pass serves it; -1 if there is only one.
};

// How many saved tensors and steps need a value, and how many values need a step.
struct Needs {
  std::vector<int> values;
  std::vector<int> steps;
};

struct Route {
  std::vector<Step> steps;
  std::vector<RouteValue> values;
  std::vector<Save> saves;
  Needs needs;
  std::vector<bool> makes_memory;  // By its number.
  // For memory that steps overwrite: the views of each value, and the values that own it.
  std::vector<std::vector<size_t>> views;
  std::vector<std::vector<size_t>> owners;  // By the number of the memory.
  std::vector<size_t> turns;  // The first step of each turn, as in `alignment.py`,
  size_t stages = 0;  // how many stages a turn has,
  std::vector<std::vector<bool>> retained;  // and the values that each leaves to others.
  bool reads_sizes = false;  // Whether what is kept may depend on the sizes of tensors.

  bool retains(long stage, size_t value) const { return stage >= 0 && retained[stage][value]; }
};

// How many turns have begun before a step has run.
inline size_t turn_of(const Route& route, size_t step) {
  return std::upper_bound(route.turns.begin(), route.turns.end(), step) - route.turns.begin();
}

// Notes where the policy counts again from a number that it has passed.
inline void note_turns(Route& route) {
  long before = 0;
  for (size_t i = 0; i < route.steps.size(); ++i) {
    if (!route.steps[i].is_rebased()) {
      if (route.steps[i].place <= before) {
        route.turns.push_back(i);
      }
      before = route.steps[i].place;
    }
  }
}

inline long root_of(const Route& route, size_t value) {
  long root = route.values[value].root;
  return root < 0 ? static_cast<long>(value) : root;
}

inline bool is_rebased(const Route& route, size_t value) {
  long step = route.values[value].step;
  return step >= 0 && route.steps[step].is_rebased();
}

// Counted from the end: what needs a value comes after it.
inline Needs needs_of(const Route& route) {
  Needs needs{std::vector<int>(route.values.size()), std::vector<int>(route.steps.size())};
  for (const Save& save : route.saves) {
    ++needs.values[save.value];
  }
  for (size_t i = route.steps.size(); i-- > 0;) {
    for (long output : route.steps[i].outputs) {
      bool is_made = output >= 0 && !route.values[output].is_kept;
      needs.steps[i] += is_made && needs.values[output] > 0;
    }
    for (size_t input : route.steps[i].inputs) {
      needs.values[input] += needs.steps[i] > 0;
    }
  }
  return needs;
}

// Notes which values own memory that steps overwrite, and their views.
inline void note_written(Route& route) {
  std::vector<bool> is_written(route.makes_memory.size());
  for (const Step& step : route.steps) {
    if (step.writes()) {
      is_written[route.values[step.outputs[1]].memory] = true;
    }
  }
  route.views.resize(route.values.size());
  route.owners.resize(route.makes_memory.size());
  for (size_t i = 0; i < route.values.size(); ++i) {
    const RouteValue& value = route.values[i];
    if (is_written[value.memory]) {
      (value.root < 0 ? route.owners[value.memory] : route.views[value.root]).push_back(i);
    }
  }
}

// Keeps the geometry of the parts that steps overwrite, and that of memory that is viewed
// again, which a call must have: that of most views follows. False if it is not known.
inline bool forget_geometry(Route& route) {
  bool is_known = true;
  std::vector<bool> is_viewed(route.makes_memory.size()), is_part(route.values.size());
  for (const Step& step : route.steps) {
    if (step.is_rebased() || step.part >= 0) {
      is_viewed[route.values[step.inputs[0]].memory] = true;
    }
    if (step.part >= 0) {
      is_part[step.part] = true;
    }
  }
  for (size_t i = 0; i < route.values.size(); ++i) {
    RouteValue& value = route.values[i];
    bool is_used = value.root < 0 ? is_viewed[value.memory] : is_rebased(route, i) || is_part[i];
    is_known &= !is_used || value.geometry;
    if (!is_used && !route.reads_sizes) {
      value.geometry.reset();
    }
  }
  return is_known;
}

} // namespace membudget
