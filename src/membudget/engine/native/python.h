// Python objects in C++: owned references, and attributes declared in `__slots__`.

#pragma once

#include <Python.h>
#include <structmember.h>
#include <torch/csrc/Exceptions.h>

#include <initializer_list>
#include <utility>

namespace membudget {

// Throws the Python error that is set, which the dispatcher carries to its caller.
[[noreturn]] inline void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

// Owns one reference to a Python object, or none.
class Ref {
 public:
  Ref() = default;
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref(const Ref& other) : object_(Py_XNewRef(other.object_)) {}
  ~Ref() { Py_XDECREF(object_); }

  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }

  // Takes over a new reference, the result of a call that returns null on errors.
  static Ref made(PyObject* object) {
    if (object == nullptr) {
      throw_python_error();
    }
    return Ref(object);
  }

  static Ref to(PyObject* object) { return Ref(Py_XNewRef(object)); }

  operator PyObject*() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  explicit Ref(PyObject* object) : object_(object) {}

  PyObject* object_ = nullptr;
};

inline void check(int status) {
  if (status < 0) {
    throw_python_error();
  }
}

// Counts one call more, as Python does, so that no recursion overflows the stack.
class Deeper {
 public:
  // `where` ends the message of the error.
  explicit Deeper(const char* where) { check(Py_EnterRecursiveCall(where) ? -1 : 0); }
  ~Deeper() { Py_LeaveRecursiveCall(); }
  Deeper(const Deeper&) = delete;
};

// Puts an error aside while this lives, unless it is replaced by a later one.
class ErrorAside {
 public:
  ErrorAside() { PyErr_Fetch(&type_, &error_, &trace_); }
  ~ErrorAside() {
    if (type_ != nullptr) {
      PyErr_Restore(type_, error_, trace_);
    }
  }
  ErrorAside(const ErrorAside&) = delete;

 private:
  PyObject *type_, *error_, *trace_;
};

// Hides an object that is in no cycle from Python's garbage collector.
//
// A recorded operator takes a dozen objects, which live until the backward pass. A value
// refers to its operation, and an operation to its inputs, never to what reads it: no
// collection could free them, but each would visit them all.
inline Ref unvisited(Ref object) {
  PyObject_GC_UnTrack(object);
  return object;
}

inline Ref new_list() {
  return unvisited(Ref::made(PyList_New(0)));
}

inline Ref pair(PyObject* first, PyObject* second) {
  return Ref::made(PyTuple_Pack(2, first, second));
}

inline Ref attribute(PyObject* object, PyObject* name) {
  return Ref::made(PyObject_GetAttr(object, name));
}

// An attribute of an object; null if it has none.
inline Ref attribute_of(PyObject* object, PyObject* name) {
  PyObject* found = PyObject_GetAttr(object, name);
  if (found != nullptr) {
    return Ref::made(found);
  }
  if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
    throw_python_error();
  }
  PyErr_Clear();
  return Ref();
}

// Calls a method; for the rare paths, which Python implements.
template <typename... Arguments>
Ref call(PyObject* object, PyObject* name, Arguments... arguments) {
  return Ref::made(PyObject_CallMethodObjArgs(
      object, name, static_cast<PyObject*>(arguments)..., nullptr));
}

// A pair of functions with one `self`, for Python; null with an error set if that fails.
inline PyObject* bound_pair(PyMethodDef* one, PyMethodDef* other, PyObject* self) {
  HANDLE_TH_ERRORS
  Ref first = Ref::made(PyCFunction_New(one, self));
  Ref second = Ref::made(PyCFunction_New(other, self));
  return PyTuple_Pack(2, (PyObject*)first, (PyObject*)second);
  END_HANDLE_TH_ERRORS
}

// An attribute that a class declares in `__slots__`: a pointer at a fixed offset.
class Slot {
 public:
  void find(PyObject* owner, const char* name) {
    Ref found = Ref::made(PyObject_GetAttrString(owner, name));
    if (Py_TYPE(found) != &PyMemberDescr_Type) {
      PyErr_Format(PyExc_TypeError, "%s is not an attribute in __slots__", name);
      throw_python_error();
    }
    offset_ = reinterpret_cast<PyMemberDescrObject*>((PyObject*)found)->d_member->offset;
  }

  // The attribute, borrowed; null if it was never set.
  PyObject* of(PyObject* object) const { return place(object); }

  void set(PyObject* object, PyObject* value) const {
    PyObject* before = std::exchange(place(object), Py_NewRef(value));
    Py_XDECREF(before);
  }

  void set(PyObject* object, Ref value) const {
    PyObject* before = std::exchange(place(object), value.release());
    Py_XDECREF(before);
  }

  void clear(PyObject* object) const {
    Py_XDECREF(std::exchange(place(object), nullptr));
  }

  bool is_none(PyObject* object) const { return place(object) == Py_None; }
  bool is_true(PyObject* object) const { return place(object) == Py_True; }
  long number(PyObject* object) const { return PyLong_AsLong(place(object)); }

  void set_number(PyObject* object, long value) const {
    set(object, Ref::made(PyLong_FromLong(value)));
  }

 private:
  PyObject*& place(PyObject* object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
  }

  Py_ssize_t offset_ = 0;
};

inline void add(const Slot& slot, PyObject* object, long by) {
  slot.set_number(object, slot.number(object) + by);
}

// A Python class whose attributes are slots.
class Class {
 public:
  void bind(
      PyObject* type,
      std::initializer_list<std::pair<const char*, Slot*>> slots) {
    type_ = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
    for (auto [name, slot] : slots) {
      slot->find(type, name);
    }
  }

  // An instance with no attribute set, made without `__init__`.
  Ref make() const { return Ref::made(type_->tp_alloc(type_, 0)); }

  bool is_type_of(PyObject* object) const { return Py_TYPE(object) == type_; }
  bool is_base_of(PyObject* object) const { return PyObject_TypeCheck(object, type_); }
  PyObject* type() const { return reinterpret_cast<PyObject*>(type_); }

 private:
  PyTypeObject* type_ = nullptr;
};

// The attributes of an object, each held for as long as the process lives.
class Names {
 public:
  explicit Names(PyObject* of) : of_(of) {}

  PyObject* operator()(const char* name) const {
    return Ref::made(PyObject_GetAttrString(of_, name)).release();
  }

 private:
  PyObject* of_;
};

// Holds the interpreter's lock, wherever the dispatcher calls from.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Holds the garbage collector off. New objects start it, and it may free a graph in a
// cycle, with its saved tensors, in the middle of what goes through them.
class WithoutCollection {
 public:
  WithoutCollection() {
    if (count_++ == 0) {
      was_enabled_ = PyGC_Disable() != 0;
    }
  }
  ~WithoutCollection() {
    if (--count_ == 0 && was_enabled_) {
      PyGC_Enable();
    }
  }
  WithoutCollection(const WithoutCollection&) = delete;

 private:
  // Of all threads, as the collector is; the interpreter's lock guards them.
  static inline long count_ = 0;
  static inline bool was_enabled_ = false;
};

// Lets other Python threads run while a kernel does.
class WithoutGil {
 public:
  explicit WithoutGil(bool has_kernel = true)
      : state_(has_kernel ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

} // namespace membudget
