// Draw up the route of a call while it is recorded.
//
// A route has operators that make tensors, views or uninitialised memory, and writes. With
// anything else, the call has no route.

#pragma once

#include "numbers.h"

#include <set>

namespace membudget {

// Whether the policy sees what an operator makes, and not only which operator it is.
inline bool reads_sizes(const Observed& call) {
  return recording::numbers.is_none(call.recording) &&
      decided(call.recording, call.known) == Py_None;
}

inline Step& add_step(
    Survey& of,
    const Observed& call,
    PyObject* operation,
    std::vector<size_t> inputs,
    std::vector<long> outputs,
    long kept) {
  long number = recording::number.number(call.recording);
  of.is_whole &= number == ++of.operators;
  Step step{
      &call.known, operation::overload.of(operation),
      CallBox::of(operation::native.of(operation)), std::move(inputs), std::move(outputs),
      operation::grad_enabled.is_true(operation), operation::is_view.is_true(operation),
      recording::kept.number(call.recording) - kept};
  for (size_t i = 0; i < call.stood_in_for.size(); ++i) {
    step.stood_in_for.push_back(memory_of(of, call.stood_in_for[i]));
  }
  step.number = number;
  step.place = recording::place.number(call.recording);
  of.route->reads_sizes |= reads_sizes(call);
  of.route->steps.push_back(std::move(step));
  return of.route->steps.back();
}

inline void survey_step(
    const Observed& call, PyObject* operation, const std::vector<at::Tensor>& outputs, long kept) {
  PyObject* noted = recording::survey.of(call.recording);
  if (noted != Py_None) {
    Survey& of = SurveyBox::of(noted);
    auto inputs = numbers_of(of, call);
    add_step(of, call, operation, inputs, number_outputs(of, operation, outputs), kept);
  }
}

// Notes a write to what a replay makes: the memory is made anew, or the part is kept.
inline void survey_write(
    const Observed& call, PyObject* operation, const Written& written, long kept) {
  PyObject* noted = recording::survey.of(call.recording);
  if (noted != Py_None) {
    Survey& of = SurveyBox::of(noted);
    auto inputs = numbers_of(of, call, written.before);
    size_t before = inputs[0];
    inputs[0] = root_of(*of.route, before);
    bool is_kept = value::operation.is_none(written.after);
    size_t number = number_made(
        of, is_kept ? written.after : written.root, -1,
        THPVariable_Unpack((PyObject*)call.tensors[0]));
    if (!is_kept) {
      of.route->values[number].geometry = of.route->values[inputs[0]].geometry;
    }
    bool is_part = before != inputs[0];
    auto outputs = std::vector<long>{-1, static_cast<long>(number)};
    Step& step = add_step(of, call, operation, std::move(inputs), std::move(outputs), kept);
    step.part = is_part ? static_cast<long>(before) : -1;
  }
}

// Notes a write to memory that no replay makes.
inline void survey_held_write(const Observed& call) {
  PyObject* noted = recording::survey.of(call.recording);
  if (noted != Py_None) {
    Survey& of = SurveyBox::of(noted);
    Step step{
        &call.known, call.known.overload,
        {call.target, kept_arguments(call), call.places}, numbers_of(of, call), {},
        at::GradMode::is_enabled()};
    step.number = ++of.operators;
    step.place = recording::place.number(call.recording);
    of.route->steps.push_back(std::move(step));
  }
}

// A call that does what a route cannot say has none.
inline void give_up_survey(PyObject* recording) {
  recording::survey.set(recording, Py_None);
}

// Notes a tensor that autograd saved, by its handle.
inline void survey_save(PyObject* recording, PyObject* handle, const at::Tensor& tensor) {
  PyObject* noted = recording::survey.of(recording);
  if (noted != Py_None) {
    Survey& of = SurveyBox::of(noted);
    size_t number = number_of(of, handle::value.of(handle), tensor);
    of.route->saves.push_back({number, of.route->steps.size(), handle::stage.number(handle)});
    of.handles.push_back(weak(handle));
  }
}

// survey(): what is handed to a recording whose call gets a route.
inline PyObject* new_survey(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return SurveyBox::make().release();
  END_HANDLE_TH_ERRORS
}

constexpr size_t most_turns = 64;  // As `_MOST_TURNS`.

// Whether a step is the one that a turn knows by its number: as `CallStages.is_current`.
inline bool is_current(const Route& route, size_t turn, size_t step) {
  size_t last = turn == most_turns ? route.turns.size() : turn, own = turn_of(route, step);
  bool is_last = own <= last;
  for (size_t i = own; is_last && i < last; ++i) {
    is_last = route.steps[step].place < route.steps[route.turns[i]].place;
  }
  return is_last;
}

// The values that a stage retains, of the outputs that the plan names for it: those of
// operators by number, and then by index.
inline std::vector<bool> retained_of(const Route& route, size_t turn, PyObject* outputs) {
  std::vector<bool> found(route.values.size());
  std::set<std::pair<long, size_t>> named;
  Ref all = Ref::made(PySequence_Fast(outputs, "outputs"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE((PyObject*)all); ++i) {
    PyObject* output = PySequence_Fast_GET_ITEM((PyObject*)all, i);
    named.emplace(
        PyLong_AsLong(PyTuple_GET_ITEM(output, 0)), PyLong_AsSize_t(PyTuple_GET_ITEM(output, 1)));
  }
  for (size_t i = 0; i < route.steps.size(); ++i) {
    const Step& step = route.steps[i];
    for (size_t index = 0; !step.is_rebased() && index < step.outputs.size(); ++index) {
      long value = step.outputs[index];
      if (value >= 0 && !route.values[value].is_held() && named.count({step.place, index}) &&
          is_current(route, turn, i)) {
        found[value] = true;
      }
    }
  }
  return found;
}

// Notes what each stage retains; the stages of later turns come after those of earlier ones.
inline void note_retained(Route& route, PyObject* stages) {
  route.stages = PyTuple_GET_SIZE(stages);
  size_t turns = std::min(route.turns.size(), most_turns);
  for (size_t i = 0; i < route.stages * (turns + 1); ++i) {
    route.retained.push_back(
        retained_of(route, i / route.stages, PyTuple_GET_ITEM(stages, i % route.stages)));
  }
}

// Notes the stages of saved tensors, which are final once the forward has ended; returns how
// many the tape has.
inline size_t note_stages(Survey& of) {
  size_t count = 0;
  for (size_t i = 0; i < of.handles.size(); ++i) {
    if (of.handles[i] == nullptr) {
      continue;  // Freed before the call left an earlier route.
    }
    ++count;
    PyObject* handle = PyWeakref_GET_OBJECT((PyObject*)of.handles[i]);
    if (handle != Py_None) {
      of.route->saves[i].stage = handle::stage.number(handle);
    }
  }
  return count;
}

// route(survey, operators, saved, stages): the route; `None` if not all was seen. For each
// stage of the backward pass, `stages` holds the outputs that it retains.
inline PyObject* route_of(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Survey& of = SurveyBox::of(given[0]);
  long operators = PyLong_AsLong(given[1]);
  size_t saved = PyLong_AsSize_t(given[2]);
  if (!of.is_whole || of.operators != operators || note_stages(of) != saved ||
      !forget_geometry(*of.route)) {
    Py_RETURN_NONE;
  }
  of.route->needs = needs_of(*of.route);
  note_turns(*of.route);
  note_retained(*of.route, given[3]);
  note_written(*of.route);
  return RouteBox::make(of.route).release();
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
