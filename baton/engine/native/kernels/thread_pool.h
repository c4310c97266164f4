// A thread pool for parallel loops.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace baton {

// `run` starts the same function on every thread in use, including the caller's; all are in use
// unless use() says otherwise. Inside, parallel_for() divides a loop: a free thread takes the next
// index, and no thread continues before all indices are done. Which thread takes which index
// changes from run to run, so the iterations must be independent.
//
// A waiting thread spins for about as long as the others take to finish, or until the next call is
// usually made, and then sleeps: several processes share the cores, and the thread that it waits
// for may not be running at all.
class ThreadPool {
 public:
  explicit ThreadPool(int max_size) : max_size_(max_size), size_(max_size), announced_(max_size) {
    for (int index = 1; index < max_size; ++index) {
      threads_.emplace_back([this, index] { serve(index); });
    }
  }

  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The number of threads in use.
  int size() const { return size_; }
  int max_size() const { return max_size_; }

  // Uses `size` threads from now on, but at most max_size().
  void use(int size) {
    std::lock_guard<std::mutex> one_at_a_time(running_);
    size_ = std::clamp(size, 1, max_size_);
  }

  // Wakes sleeping threads in advance of a run: that takes tens of microseconds, in which the
  // caller may do other work.
  void wake() {
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
      const std::uint64_t number = announced_.load(std::memory_order_relaxed) / kSizes + 1;
      announced_.store(number * kSizes + size_, std::memory_order_release);
    }
    if (size_ > 1) changed_.notify_all();
    work(0);
    barrier();
  }

  // Must be called by every thread in use, with the same count.
  template <class Body>
  void parallel_for(long count, Body&& body) {
    for (long index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < count;) body(index);
    barrier();
  }

 private:
  static constexpr int kSpins = 1000;  // some 20 microseconds: as long as waking a thread takes
  static constexpr int kSpinsForRun = 5000;  // spins between two calls of a step

  // A run is announced by its number times kSizes plus the number of its threads.
  static constexpr std::uint64_t kSizes = 1 << 16;

  void serve(int index) {
    std::uint64_t handled = 0;
    for (long calls = 0;;) {
      while (const std::uint64_t next = spin_until_run(index, handled)) {
        handled = next / kSizes;
        calls = num_calls_.load(std::memory_order_relaxed);
        (*work_)(index);
        barrier();
      }
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] {
        const std::uint64_t last = announced_.load(std::memory_order_relaxed);
        const bool in_use = index < static_cast<int>(last % kSizes);
        return stopping_ || (in_use && (last / kSizes != handled || num_calls_ != calls));
      });
      if (stopping_) return;
      calls = num_calls_;
    }
  }

  // Spins until a run after that with the number `handled` uses the thread, and returns its
  // announcement; returns 0 if none begins for a while, or if the last run did not use the thread.
  std::uint64_t spin_until_run(int index, std::uint64_t handled) const {
    for (int spin = 0; spin < kSpinsForRun; ++spin) {
      const std::uint64_t last = announced_.load(std::memory_order_acquire);
      if (index >= static_cast<int>(last % kSizes)) return 0;
      if (last / kSizes != handled) return last;
      _mm_pause();
    }
    return 0;
  }

  void barrier() {
    const long phase = barrier_phase_.load(std::memory_order_acquire);
    const int size = size_;  // may change as soon as all have arrived
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      release_barrier(phase);
      return;
    }
    for (int spin = 0; spin < kSpins; ++spin) {
      if (barrier_phase_.load(std::memory_order_acquire) != phase) return;
      _mm_pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_sleeping_;
    changed_.wait(lock, [&] { return barrier_phase_.load(std::memory_order_acquire) != phase; });
    --num_sleeping_;
  }

  // Called by the last thread to arrive: all others wait at the barrier, spinning or asleep.
  void release_barrier(long phase) {
    next_.store(0, std::memory_order_relaxed);
    num_arrived_.store(0, std::memory_order_relaxed);
    if (size_ == 1) return;
    bool wake;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      barrier_phase_.store(phase + 1, std::memory_order_release);
      wake = num_sleeping_ > 0;
    }
    if (wake) changed_.notify_all();
  }

  const int max_size_;
  int size_;
  std::vector<std::thread> threads_;
  std::mutex running_, mutex_;
  std::condition_variable changed_;
  const std::function<void(int)>* work_ = nullptr;
  bool stopping_ = false;
  int num_sleeping_ = 0;
  std::atomic<std::uint64_t> announced_;
  std::atomic<long> num_calls_{0}, next_{0}, barrier_phase_{0};
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
