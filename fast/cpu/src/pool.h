// The threads of the CPU kernels.
#pragma once

namespace tq {

// Calls work(context, index) once for every index in 0 .. count - 1, on at most `threads` threads, the caller's
// included, in any order, and returns when all calls have returned. What the calls wrote is visible then.
//
// work must not throw and must keep its stack below 256 KB. A call from within work, and a call while another thread
// uses the pool, run all of their indices on the caller's own thread.
void parallel_for(int count, int threads, void (*work)(void* context, int index), void* context);

// The same for a callable: parallel_for(count, threads, [&](int index) { ... }).
template <class Work>
inline void parallel_for(int count, int threads, Work&& work) {
  struct Bridge {
    static void call(void* context, int index) { (*static_cast<Work*>(context))(index); }
  };
  parallel_for(count, threads, &Bridge::call, const_cast<void*>(static_cast<const void*>(&work)));
}

}  // namespace tq
