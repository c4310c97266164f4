// Threads that go through a piece of work together, or one that does it alone.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace baton {

// `run` starts the same function on every thread, the caller's among them. Inside, each() shares
// out a loop: who is free takes the next index, and nobody goes on before all indices are done.
// Which thread takes what changes from run to run, so an index must not depend on another.
//
// Who waits spins for as long as the others may well take, or the next call may be away, and
// sleeps from then on: several processes share the cores, and the one that is waited for may not be
// running at all.
class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int index = 1; index < size; ++index) threads_.emplace_back([this, index] { serve(index); });
  }

  ~Team() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      leaving_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Says that something is about to be run: a sleeper takes tens of microseconds to come, in which
  // the caller may have other things to do.
  void rouse() {
    if (size_ == 1) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      num_calls_.fetch_add(1, std::memory_order_relaxed);
    }
    changed_.notify_all();
  }

  // `work` gets the thread's number below size(), and must not throw.
  void run(const std::function<void(int)>& work) {
    std::lock_guard<std::mutex> one_at_a_time(running_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work;
      num_runs_.fetch_add(1, std::memory_order_release);
    }
    if (size_ > 1) changed_.notify_all();
    work(0);
    barrier();
  }

  // Called by every thread of the team, with the same count.
  template <class Body>
  void each(long count, Body&& body) {
    for (long index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < count;) body(index);
    barrier();
  }

 private:
  static constexpr int kSpins = 1000;  // some 20 microseconds: what waking a thread would cost
  static constexpr int kRests = 5000;  // from one call of a step to the next

  void serve(int index) {
    for (long runs = 0, calls = 0;;) {
      while (comes(runs)) {
        ++runs;
        calls = num_calls_.load(std::memory_order_relaxed);
        (*work_)(index);
        barrier();
      }
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return leaving_ || num_runs_ != runs || num_calls_ != calls; });
      if (leaving_) return;
      calls = num_calls_;
    }
  }

  // Whether there is another run than those seen, or comes to be one soon.
  bool comes(long runs) const {
    for (int spin = 0; spin < kRests; ++spin) {
      if (num_runs_.load(std::memory_order_acquire) != runs) return true;
      _mm_pause();
    }
    return false;
  }

  void barrier() {
    const long turn = num_passed_.load(std::memory_order_acquire);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      open(turn);
      return;
    }
    for (int spin = 0; spin < kSpins; ++spin) {
      if (num_passed_.load(std::memory_order_acquire) != turn) return;
      _mm_pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_asleep_;
    changed_.wait(lock, [&] { return num_passed_.load(std::memory_order_acquire) != turn; });
    --num_asleep_;
  }

  // By the last one that arrives: all others are at the barrier, or asleep there.
  void open(long turn) {
    next_.store(0, std::memory_order_relaxed);
    num_arrived_.store(0, std::memory_order_relaxed);
    if (size_ == 1) return;
    bool wake;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      num_passed_.store(turn + 1, std::memory_order_release);
      wake = num_asleep_ > 0;
    }
    if (wake) changed_.notify_all();
  }

  const int size_;
  std::vector<std::thread> threads_;
  std::mutex running_, mutex_;
  std::condition_variable changed_;
  const std::function<void(int)>* work_ = nullptr;
  bool leaving_ = false;
  int num_asleep_ = 0;
  std::atomic<long> num_runs_{0}, num_calls_{0}, next_{0}, num_passed_{0};
  std::atomic<int> num_arrived_{0};
};

// Seconds of work below which waking others would cost more than they save: tens of microseconds
// on a quiet machine, and as long as the scheduler pleases on a busy one.
constexpr double kWorthWaking = 100e-6;

// What a product takes one core: as long as its weights come from memory, or as it multiplies.
inline double seconds_of(double rows, double weights) {
  return weights * std::max(4 / 20e9, rows * 2 / 100e9);
}

}  // namespace baton
