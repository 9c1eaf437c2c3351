// The conditions under which operators run again: the settings of the forward, and that no
// other thread draws meanwhile.

#pragma once

#include "replay.h"
#include "settings.h"

namespace membudget {

inline PyObject *exit_name, *isolation_enter, *isolation_leave, *scope_class;
inline PyObject* isolation_registry;

inline Class ambient_class;
namespace ambient {
inline Slot context, dispatch_modes, function_modes, settings;
}

inline Class registry_class;
namespace registry {
inline Slot owner, running, shared;
}

inline bool has_settings(PyObject* of) {
  PyObject* noted = ambient::settings.of(of);
  Ref now = settings_now();
  int same = noted == now ? 1 : PyObject_RichCompareBool(noted, now, Py_EQ);
  check(same);
  return same == 1;
}

// Whether `Ambient.enter_for_operators`, if that is what is given, would restore nothing.
inline bool restores_nothing(PyObject* enter) {
  if (!PyMethod_Check(enter) || !ambient_class.is_type_of(PyMethod_GET_SELF(enter))) {
    return false;
  }
  PyObject* of = PyMethod_GET_SELF(enter);
  return PyTuple_GET_SIZE(ambient::dispatch_modes.of(of)) == 0 && has_settings(of);
}

// A scope in which `Replayer._enter` has restored the settings of the forward.
class Entered {
 public:
  // Calls another constructor, so that what was entered is left if the rest fails.
  explicit Entered(PyObject* of) : Entered() {
    PyObject* enter = replayer::enter.of(of);
    if (!restores_nothing(enter)) {
      scope_ = Ref::made(PyObject_CallNoArgs(scope_class));
      Ref::made(PyObject_CallOneArg(enter, scope_));
    }
  }
  ~Entered() {
    if (scope_ != nullptr && PyList_GET_SIZE((PyObject*)scope_) > 0) {
      ErrorAside error;
      Py_XDECREF(PyObject_CallMethodObjArgs(
          scope_, exit_name, Py_None, Py_None, Py_None, nullptr));
    }
  }
  Entered(const Entered&) = delete;

 private:
  Entered() = default;

  Ref scope_;
};

// As `isolation.enter`: whether it was counted.
inline bool enter_isolated() {
  unsigned long me = PyThread_get_thread_ident();
  if (registry::shared.is_true(isolation_registry) ||
      PyLong_AsUnsignedLong(registry::owner.of(isolation_registry)) != me) {
    return Ref::made(PyObject_CallNoArgs(isolation_enter)) == Py_True;
  }
  add(registry::running, isolation_registry, 1);
  return true;
}

// As `isolation.leave`.
inline void leave_isolated() {
  if (registry::shared.is_true(isolation_registry)) {
    ErrorAside error;
    Py_XDECREF(PyObject_CallNoArgs(isolation_leave));
    return;
  }
  add(registry::running, isolation_registry, -1);
}

class Isolated {
 public:
  Isolated() : counted_(enter_isolated()) {}
  ~Isolated() {
    if (counted_) {
      leave_isolated();
    }
  }
  Isolated(const Isolated&) = delete;

 private:
  bool counted_;
};

} // namespace membudget
