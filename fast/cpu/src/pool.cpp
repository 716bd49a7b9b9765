// A pool of threads that live as long as the process. See pool.h.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

#include <pthread.h>
#include <unistd.h>

namespace tq {
namespace {

// A thread that sleeps wakes late, so it looks for work this long before it sleeps.
constexpr auto SPIN = std::chrono::microseconds(40);
// The top bit of Pool::gate: threads may enter. The other bits count those inside.
constexpr uint32_t OPEN = 0x80000000u;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Pool {
  const pid_t process = getpid();
  std::mutex busy;  // held by the one caller that uses the threads
  int workers = 0;  // guarded by busy

  // The job; written while the gate is closed and nobody is inside.
  void (*work)(void*, int) = nullptr;
  void* context = nullptr;
  int count = 0, helpers = 0;
  std::atomic<int> next{0};

  std::atomic<uint32_t> gate{0};
  std::atomic<uint64_t> generation{0};
  std::atomic<int> sleepers{0};
  std::mutex sleep;
  std::condition_variable wake;
};

std::atomic<Pool*> shared{nullptr};
thread_local bool inside = false;

void take_all(Pool& pool) {
  for (;;) {
    const int index = pool.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= pool.count) return;
    pool.work(pool.context, index);
  }
}

// Waits for a generation other than `seen` and returns it.
uint64_t next_generation(Pool& pool, uint64_t seen) {
  const auto until = std::chrono::steady_clock::now() + SPIN;
  do {
    for (int turn = 0; turn < 64; turn++) {
      const uint64_t now = pool.generation.load(std::memory_order_acquire);
      if (now != seen) return now;
      relax();
    }
  } while (std::chrono::steady_clock::now() < until);
  std::unique_lock<std::mutex> lock(pool.sleep);
  // Announced before the generation is looked at again: a caller changes it first and counts sleepers then.
  pool.sleepers.fetch_add(1);
  pool.wake.wait(lock, [&] { return pool.generation.load() != seen; });
  pool.sleepers.fetch_sub(1);
  return pool.generation.load();
}

void serve(Pool* pool, int number, uint64_t seen) {
  inside = true;
  for (;;) {
    seen = next_generation(*pool, seen);
    // Entering counts before the gate is looked at, so a job cannot change while somebody may read it.
    if (pool->gate.fetch_add(1, std::memory_order_acquire) & OPEN) {
      if (number < pool->helpers) take_all(*pool);
    }
    pool->gate.fetch_sub(1, std::memory_order_release);
  }
}

Pool& current() {
  Pool* pool = shared.load(std::memory_order_acquire);
  // After a fork the child has none of its parent's threads. Their pool is given up, locks and all.
  while (pool == nullptr || pool->process != getpid()) {
    Pool* fresh = new Pool;
    if (shared.compare_exchange_strong(pool, fresh)) return *fresh;
    delete fresh;
  }
  return *pool;
}

// Makes sure that the pool has this many threads, if the system gives them.
void grow(Pool& pool, int wanted) {
  if (pool.workers >= wanted) return;
  // Signals belong to the threads of the program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (; pool.workers < wanted; pool.workers++) {
      std::thread(serve, &pool, pool.workers, pool.generation.load()).detach();
    }
  } catch (const std::system_error&) {
    // Fewer threads do the same work.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void parallel_for(int count, int threads, void (*work)(void* context, int index), void* context) {
  const int helpers = (threads < count ? threads : count) - 1;
  Pool* pool = helpers > 0 && !inside ? &current() : nullptr;
  if (pool == nullptr || !pool->busy.try_lock()) {
    for (int index = 0; index < count; index++) work(context, index);
    return;
  }
  const std::lock_guard<std::mutex> lock(pool->busy, std::adopt_lock);
  grow(*pool, helpers);
  pool->work = work;
  pool->context = context;
  pool->count = count;
  pool->helpers = helpers;
  pool->next.store(0, std::memory_order_relaxed);
  pool->gate.fetch_or(OPEN, std::memory_order_release);
  pool->generation.fetch_add(1);
  if (pool->sleepers.load() > 0) {
    { const std::lock_guard<std::mutex> awake(pool->sleep); }
    pool->wake.notify_all();
  }
  inside = true;
  take_all(*pool);
  inside = false;
  pool->gate.fetch_and(~OPEN, std::memory_order_acq_rel);
  for (int turn = 0; pool->gate.load(std::memory_order_acquire) != 0; turn++) {
    // A helper that lost its core needs one.
    if (turn < 2000) relax();
    else std::this_thread::yield();
  }
}

}  // namespace tq
