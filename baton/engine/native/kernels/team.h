// A thread pool for parallel loops.
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

// `run` starts the same function on every thread, including the caller's. Inside, each() divides a
// loop: a free thread takes the next index, and no thread continues before all indices are done.
// Which thread takes which index changes from run to run, so the iterations must be independent.
//
// A waiting thread spins for about as long as the others take to finish, or until the next call is
// usually made, and then sleeps: several processes share the cores, and the thread that it waits
// for may not be running at all.
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

  // Wakes sleeping threads in advance of a run: that takes tens of microseconds, in which the
  // caller may do other work.
  void rouse() {
    if (size_ == 1) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      num_calls_.fetch_add(1, std::memory_order_relaxed);
    }
    changed_.notify_all();
  }

  // `work` gets the thread's index, below size(), and must not throw.
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

  // Must be called by every thread of the team, with the same count.
  template <class Body>
  void each(long count, Body&& body) {
    for (long index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < count;) body(index);
    barrier();
  }

 private:
  static constexpr int kSpins = 1000;  // some 20 microseconds: as long as waking a thread takes
  static constexpr int kRests = 5000;  // spins between two calls of a step

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

  // Spins until a run begins after the first `runs`; returns false if none begins for a while.
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

  // Called by the last thread to arrive: all others wait at the barrier, spinning or asleep.
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

// Seconds of work below which waking other threads costs more time than they save. Waking takes
// tens of microseconds on an idle machine, and may take much longer on a busy one.
constexpr double kWorthWaking = 100e-6;

// Estimates the seconds that a product takes on one core: the time to read its weights from memory
// or to multiply, whichever is longer.
inline double seconds_of(double rows, double weights) {
  return weights * std::max(4 / 20e9, rows * 2 / 100e9);
}

}  // namespace baton
