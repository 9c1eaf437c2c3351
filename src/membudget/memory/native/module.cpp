// Counts the bytes that torch's CPU allocator hands out and takes back.
//
// The counter stands in front of the allocator that was there, which does the work, so
// that it changes neither addresses nor what torch's profiler sees. Memory that was
// handed out before it stood there is released past it.

#include <Python.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

struct Block {
  std::int64_t bytes;
  c10::Allocator* from;  // Another may stand there when the block is released.
};

std::mutex mutex;
std::unordered_map<void*, Block> blocks;
std::int64_t live_bytes = 0;
std::int64_t most_bytes = 0;
std::int64_t failed_count = 0;
c10::Allocator* inner = nullptr;

constexpr std::uint8_t priority = 200;

void release(void* memory) {
  c10::Allocator* from = inner;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find(memory);
    if (found != blocks.end()) {
      live_bytes -= found->second.bytes;
      from = found->second.from;
      blocks.erase(found);
    }
  }
  from->raw_deallocate(memory);
}

struct Counter final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* memory = nullptr;
    try {
      memory = inner->raw_allocate(bytes);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex);
      ++failed_count;
      throw;
    }
    if (memory != nullptr) {
      std::lock_guard<std::mutex> lock(mutex);
      blocks[memory] = {static_cast<std::int64_t>(bytes), inner};
      live_bytes += static_cast<std::int64_t>(bytes);
      most_bytes = std::max(most_bytes, live_bytes);
    }
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

// It lives until the process ends: tensors that it counted may outlive the counting.
Counter& counter() {
  static auto* made = new Counter();
  return *made;
}

PyObject* start(PyObject*, PyObject*) {
  c10::Allocator* current = c10::GetCPUAllocator();
  if (current != &counter()) {
    inner = current;
    c10::SetCPUAllocator(&counter(), priority);
  }
  if (c10::GetCPUAllocator() == &counter()) Py_RETURN_TRUE;
  Py_RETURN_FALSE;
}

PyObject* stop(PyObject*, PyObject*) {
  // If another allocator stands in front by now, it goes on to use this one.
  if (c10::GetCPUAllocator() == &counter()) {
    c10::SetCPUAllocator(inner, priority);
  }
  Py_RETURN_NONE;
}

PyObject* live(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> lock(mutex);
  return PyLong_FromLongLong(live_bytes);
}

PyObject* most(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> lock(mutex);
  return PyLong_FromLongLong(most_bytes);
}

PyObject* failed(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> lock(mutex);
  return PyLong_FromLongLong(failed_count);
}

PyObject* restart(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> lock(mutex);
  most_bytes = live_bytes;
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"start", start, METH_NOARGS, "Count from now on; return whether that is possible."},
    {"stop", stop, METH_NOARGS, "Count no more allocations."},
    {"live", live, METH_NOARGS, "Return the live bytes that were counted."},
    {"most", most, METH_NOARGS, "Return the most of them since the last restart."},
    {"failed", failed, METH_NOARGS, "Return how many allocations have failed."},
    {"restart", restart, METH_NOARGS, "Let the most be what is live now."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_counter", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit__counter() { return PyModule_Create(&definition); }
