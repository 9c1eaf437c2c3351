// Streams: a launch only queues, and work runs when somebody waits for it.
//
// On a GPU a race is won or lost by chance. Here it is always lost: work that nobody has
// waited for has not run, so a reader that waits for too little finds what was there
// before. To wait for a position of a stream runs that stream up to it and, through
// events, what its work waits for in other streams; nothing else.
//
// How long work would take is computed beside it. Each stream, each direction of the
// link and the host have a clock: a launch begins when its stream, its engine and what it
// waits for are free, and the host's clock stands still but for launches and waits.
// "Has it finished?" is answered by these clocks, so that the answer repeats.

#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "settings.h"

namespace emulated {

using Work = std::function<void()>;

// A moment in a stream: after the work that was queued up to a number.
struct Position {
  int device = 0;
  int64_t stream = 0;
  uint64_t number = 0;
  Picoseconds time = 0;
};

enum class Engine { kernels, to_device, to_host };

struct Launch {
  Work work;
  Picoseconds cost = 0;
  Engine engine = Engine::kernels;
  std::optional<Position> after = {};  // Of another stream; then there is no work.
  bool by_host = true;  // Costs the host a launch; the allocator's own work does not.
};

struct Stream {
  std::deque<Launch> waiting;
  uint64_t queued = 0;
  uint64_t done = 0;
  Picoseconds free_at = 0;
  bool has_thread = false;
};

// A launch into a stream with this many waiting runs its first, as a GPU blocks the host.
constexpr size_t longest_queue = 1 << 14;

class Queues {
 public:
  Position launch(int device, int64_t stream, Launch launch) {
    Lock lock;
    auto& queue = streams_[{device, stream}];
    ++launches;
    if (launch.by_host && !launch.after) host_time += settings.launch;
    advance(device, queue, launch);
    queue.waiting.push_back(std::move(launch));
    const Position position{device, stream, ++queue.queued, queue.free_at};
    if (settings.mode == Mode::threads) {
      wake(position);
    } else if (settings.mode == Mode::eager) {
      run_until(position);
    } else if (queue.waiting.size() > longest_queue) {
      run_until({device, stream, queue.done + 1});
    }
    return position;
  }

  // Everything queued in a stream up to now.
  Position end_of(int device, int64_t stream) {
    Lock lock;
    const auto& queue = streams_[{device, stream}];
    return {device, stream, queue.queued, queue.free_at};
  }

  // The same, as an event that the host records now.
  Position recorded(int device, int64_t stream) {
    Lock lock;
    auto position = end_of(device, stream);
    position.time = std::max(position.time, host_time);
    return position;
  }

  std::vector<Position> ends_of(int device) {
    Lock lock;
    std::vector<Position> ends;
    for (const auto& [key, queue] : streams_)
      if (key.first == device) ends.push_back(end_of(device, key.second));
    return ends;
  }

  bool is_done(const Position& position) {
    Lock lock;
    if (settings.mode == Mode::threads)
      return streams_[{position.device, position.stream}].done >= position.number;
    return position.time <= host_time;
  }

  // Whether it is done, as a query of the host, which may read the results if it is.
  bool query(const Position& position) {
    Lock lock;
    const bool done = is_done(position);
    if (done) run(position);
    return done;
  }

  // Make the results of a position real; the host's clock does not move.
  void run(const Position& position) {
    Lock lock;
    if (settings.mode != Mode::threads) return run_until(position);
    WithoutGil waiting;
    changed_.wait(mutex, [&] { return is_done(position); });
  }

  // What the host does when it waits; an error of the work is raised here.
  void synchronize(const Position& position) {
    Lock lock;
    ++waits;
    run(position);
    host_time = std::max(host_time, position.time);
    if (auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

  void synchronize_device(int device) {
    for (const auto& end : ends_of(device)) synchronize(end);
  }

  uint64_t launches = 0;
  uint64_t waits = 0;
  Picoseconds host_time = 0;

 private:
  void advance(int device, Stream& queue, const Launch& launch) {
    if (launch.after) {
      queue.free_at = std::max(queue.free_at, launch.after->time);
      return;
    }
    // Work of the allocator takes no time: an idle stream's clock stays where it is.
    if (!launch.by_host && !launch.cost) return;
    auto start = std::max(queue.free_at, host_time);
    if (launch.engine == Engine::kernels) {
      queue.free_at = start + launch.cost;
      return;
    }
    auto& engine = links_[device][launch.engine == Engine::to_device ? 0 : 1];
    engine = queue.free_at = std::max(start, engine) + launch.cost;
  }

  void run_until(const Position& position) {
    auto& queue = streams_[{position.device, position.stream}];
    while (queue.done < position.number) {
      Launch launch = std::move(queue.waiting.front());
      queue.waiting.pop_front();
      ++queue.done;
      if (launch.after) run_until(*launch.after);
      perform(launch);
    }
  }

  void perform(const Launch& launch) {
    if (!launch.work) return;
    try {
      launch.work();
    } catch (...) {
      Lock lock;
      if (!error_) error_ = std::current_exception();
    }
  }

  void wake(const Position& position) {
    auto& queue = streams_[{position.device, position.stream}];
    if (!std::exchange(queue.has_thread, true))
      std::thread([this, &queue] { serve(queue); }).detach();
    changed_.notify_all();
  }

  // The thread of a stream.
  void serve(Stream& queue) {
    Lock lock;
    for (;;) {
      changed_.wait(mutex, [&] {
        return settings.mode == Mode::threads && !queue.waiting.empty() &&
            (!queue.waiting.front().after || is_done(*queue.waiting.front().after));
      });
      Launch launch = std::move(queue.waiting.front());
      queue.waiting.pop_front();
      {
        Unlocked working;
        const auto end = std::chrono::steady_clock::now() +
            std::chrono::nanoseconds(launch.cost / 1000);
        perform(launch);
        launch.work = nullptr;
        std::this_thread::sleep_until(end);
      }
      ++queue.done;
      changed_.notify_all();
    }
  }

  std::map<std::pair<int, int64_t>, Stream> streams_;
  std::map<int, std::array<Picoseconds, 2>> links_;
  std::condition_variable_any changed_;
  std::exception_ptr error_;
};

inline Queues& queues = *new Queues;

inline thread_local std::map<int, int64_t> current_streams;

inline int64_t current_stream(int device) { return current_streams[device]; }

// Queue work in the current stream of a device.
inline Position launch(int device, Launch launch) {
  return queues.launch(device, current_stream(device), std::move(launch));
}

// Let a stream wait for a position of another.
inline void wait_for(int device, int64_t stream, const Position& position) {
  Launch waiting;
  waiting.after = position;
  queues.launch(device, stream, std::move(waiting));
}

}  // namespace emulated
