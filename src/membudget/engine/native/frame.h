// One call of a replay region, before the region's function runs: as
// `ReplayFrame.__init__`, and what it calls.

#pragma once

#include "known.h"

namespace membudget {

inline Class native_replayer;
inline PyObject *call_stages, *current_stream, *is_subclass, *module_path_in, *operator_conditions,
    *routes_of, *weakly_in_python;
inline PyObject *alignment_name, *enter_for_operators_name, *hooks_name, *leave_path_name,
    *names_name, *numbers_name, *reads_arguments_name, *sees_subclasses_name, *stages_name;

// As `weakly`.
inline Ref weakly(PyObject* function) {
  PyObject* owner = PyMethod_Check(function) ? PyMethod_GET_SELF(function) : function;
  if (PyObject* made = PyWeakref_NewRef(owner, nullptr)) {
    return Ref::made(made);
  }
  PyErr_Clear();
  return Ref::made(PyObject_CallOneArg(weakly_in_python, function));
}

// The tensors among a call's arguments.
struct Given {
  Ref places = Ref::made(PyDict_New());  // Of each by its address: how many come before.
  long count = 0;
  bool has_subclasses = false;

  void note(PyObject* value) {
    if (THPVariable_Check(value)) {
      bool is_usual = is_usual_class(value) && is_plain(THPVariable_Unpack(value));
      Ref address = is_usual ? number(address_of(THPVariable_Unpack(value)))
                             : Ref::made(PyObject_CallOneArg(address_of_python, value));
      check(PyDict_SetItem(places, address, number(count++)));
      has_subclasses |= !is_usual_class(value) &&
          Ref::made(PyObject_CallOneArg(is_subclass, value)) == Py_True;
    } else if (PyTuple_Check(value) || PyList_Check(value)) {
      Deeper deeper(" while a region looks for tensors");  // A list may contain itself.
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
        note(PySequence_Fast_GET_ITEM(value, i));
      }
    }
  }
};

inline Given given_in(PyObject* args, PyObject* kwargs) {
  Given found;
  found.note(args);
  PyObject *name, *value;
  for (Py_ssize_t i = 0; PyDict_Next(kwargs, &i, &name, &value);) {
    found.note(value);
  }
  return found;
}

// As `Tracker.__init__`.
inline Ref new_tracker() {
  Ref table = Ref::made(PyDict_New()), places = Ref::made(PyDict_New());
  Ref both = Ref::made(callbacks(nullptr, pair(table, places)));
  Ref made = live_tracker.make();
  tracker::forget.set(made, PyTuple_GET_ITEM((PyObject*)both, 0));
  tracker::freed.set(made, PyTuple_GET_ITEM((PyObject*)both, 1));
  tracker::table.set(made, std::move(table));
  tracker::places.set(made, std::move(places));
  tracker::sources.set(made, Ref::made(PyList_New(0)));
  tracker::clock.set(made, zero);
  tracker::writes.set(made, Py_None);
  return made;
}

// As `ForwardRecord.__init__`.
inline Ref new_record(
    PyObject* policy, PyObject* options, Ref unrepeatable, Ref module_path, PyObject* stages,
    PyObject* stream) {
  Ref alignment = attribute(policy, alignment_name);
  Ref made = forward_record.make();
  recording::tracker.set(made, new_tracker());
  recording::number.set(made, zero);
  recording::place.set(made, zero);
  recording::kept.set(made, zero);
  recording::names.set(made, alignment == Py_None ? alignment : attribute(alignment, names_name));
  recording::policy.set(made, policy);
  recording::numbers.set(made, attribute(policy, numbers_name));
  recording::reads_arguments.set(made, attribute(policy, reads_arguments_name));
  recording::unrepeatable.set(made, std::move(unrepeatable));
  recording::module_path.set(made, std::move(module_path));
  recording::decisions.set(made, options::decisions.of(options));
  recording::stages.set(made, stages);
  recording::stream.set(made, stream);
  recording::recent.set(made, Ref::made(PyList_New(0)));
  recording::streams.set(made, Ref::made(PyList_New(0)));
  for (Slot* slot : {&recording::left_path, &recording::path, &recording::routes,
                     &recording::survey, &recording::taken, &recording::trip}) {
    slot->set(made, Py_None);
  }
  return made;
}

// As `new_replayer(operator_conditions(), stages)`.
inline Ref new_replayer(PyObject* stages, PyObject* stream) {
  Ref made = native_replayer.make();
  replayer::enter.set(
      made, stream == Py_None ? attribute(new_ambient(), enter_for_operators_name)
                              : Ref::made(PyObject_CallNoArgs(operator_conditions)));
  replayer::stages.set(made, stages);
  replayer::stream.set(made, stream);
  replayer::begins.set(made, no_targets);
  replayer::entries.set(made, Ref::made(PySet_New(nullptr)));
  replayer::handles.set(made, Ref::made(PyList_New(0)));
  replayer::memoised.set(made, Ref::made(PyDict_New()));
  for (Slot* slot : {&replayer::plan, &replayer::plan_ran, &replayer::plans_run}) {
    slot->set(made, zero);
  }
  replayer::stage.set_number(made, -1);
  replayer::task.set_number(made, -1);
  replayer::trip.set(made, Py_None);
  return made;
}

// As `Recorder.__init__`.
inline Ref new_recorder(Ref recording) {
  Ref made = recorder_class.make();
  recorder::recording.set(made, std::move(recording));
  recorder::is_suspended.set(made, Py_False);
  recorder::opaque_depth.set(made, zero);
  recorder::fingerprinter.set(made, Py_None);
  recorder::late.set(made, Ref::made(PyList_New(0)));
  return made;
}

inline bool is_always(PyObject* verify) {
  return PyUnicode_Check(verify) && PyUnicode_CompareWithASCIIString(verify, "always") == 0;
}

// Whether `Checks._begin` lets the call follow its newest path, and verifies nothing.
inline bool is_known_to_the_end(PyObject* options, PyObject* known) {
  return known == Py_None ||
      (PyList_GET_SIZE(verified::paths.of(known)) != 0 && !verified::is_pending.is_true(known) &&
       !is_always(options::verify.of(options)) &&
       (verified::sampling.is_none(known) ||
        !sampling::is_due.is_true(verified::sampling.of(known))));
}

// As `Checks.__init__`.
inline Ref new_checks(PyObject* recorder, PyObject* options, PyObject* known, PyObject* statistics) {
  if (!is_known_to_the_end(options, known)) {
    return Ref::made(PyObject_CallFunctionObjArgs(
        checks_class.type(), recorder, options, known, statistics, nullptr));
  }
  Ref made = checks_class.make();
  checks::recorder.set(made, recorder);
  checks::verify.set(made, options::verify.of(options));
  checks::is_strict.set(made, options::strict.of(options));
  checks::verified.set(made, known);
  checks::statistics.set(made, statistics);
  for (Slot* slot : {&checks::comparison, &checks::originals}) {
    slot->set(made, Py_None);
  }
  if (known != Py_None) {
    PyObject *recording = recorder::recording.of(recorder), *paths = verified::paths.of(known);
    recording::path.set(recording, PyList_GET_ITEM(paths, PyList_GET_SIZE(paths) - 1));
    recording::left_path.set(recording, attribute(made, leave_path_name));
  }
  return made;
}

// As `Checks.is_quiet`.
inline bool is_quiet(PyObject* checks, PyObject* recorder, PyObject* known) {
  if (checks::is_strict.is_true(checks)) {
    return false;
  }
  return known == Py_None ||
      (!recording::path.is_none(recorder::recording.of(recorder)) &&
       recorder::fingerprinter.is_none(recorder) &&
       PySet_GET_SIZE(verified::unrepeatable.of(known)) == 0);
}

// As `CallStages.of`.
inline Ref new_stages(PyObject* policy) {
  Ref plan = attribute(policy, stages_name);
  return plan == Py_None ? plan
                         : Ref::made(PyObject_CallFunctionObjArgs(
                               call_stages, (PyObject*)plan,
                               (PyObject*)attribute(policy, alignment_name), nullptr));
}

inline Ref stream_now() {
  return at::getAccelerator().has_value() ? Ref::made(PyObject_CallNoArgs(current_stream))
                                          : Ref::to(Py_None);
}

// As `following.routes_of`.
inline Ref routes_for(PyObject* options, PyObject* function, PyObject* known) {
  if (known != Py_None && options::may_follow.is_true(options)) {
    return Ref::to(verified::routes.of(known));
  }
  return Ref::made(PyObject_CallFunctionObjArgs(routes_of, options, function, known, nullptr));
}

// replay_frame(function, args, kwargs, options, statistics): a new `ReplayFrame`.
inline PyObject* new_replay_frame(PyObject*, PyObject* const* of, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject *function = of[0], *options = of[3], *statistics = of[4];
  Given given = given_in(of[1], of[2]);
  PyObject* offload = options::offload.of(options);
  bool verifies = options::verify.of(options) != Py_False;
  Ref known = verifies ? known_of(options, function, of[1], of[2]) : Ref::to(Py_None);
  Ref policy = call(options::policy.of(options), begin_name);
  Ref stages = new_stages(policy), stream = stream_now();
  Ref unrepeatable = known == Py_None ? Ref::made(PySet_New(nullptr))
                                      : Ref::to(verified::unrepeatable.of(known));
  PyObject* label = statistics == Py_None ? no_text : statistics::label.of(statistics);
  Ref module_path =
      Ref::made(PyObject_CallFunctionObjArgs(module_path_in, function, label, nullptr));
  Ref recording = new_record(
      policy, options, std::move(unrepeatable), std::move(module_path), stages, stream);
  Ref recorder = new_recorder(Ref::to(recording));
  Ref checks = new_checks(recorder, options, known, statistics);
  if (given.has_subclasses || (known != Py_None && verified::has_subclasses.is_true(known))) {
    check(PyObject_SetAttr(recorder, sees_subclasses_name, Py_True));
  } else if (offload == Py_None && is_quiet(checks, recorder, known)) {
    recording::routes.set(recording, routes_for(options, function, known));
  }
  Ref made = frame_class.make();
  frame::function.set(made, function);
  frame::named.set(made, weakly(function));
  frame::statistics.set(made, statistics);
  frame::lock.set(made, Ref::made(PyObject_CallNoArgs(lock_class)));
  frame::arguments.set(made, std::move(given.places));
  frame::inputs.set(made, offload == Py_None ? Ref::to(Py_None) : attribute(offload, hooks_name));
  frame::recorder.set(made, std::move(recorder));
  frame::replayer.set(made, new_replayer(stages, stream));
  frame::checks.set(made, std::move(checks));
  return made.release();
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
