//! The one order that processors do not keep by themselves.

/// Everything stored before this is seen by everybody before anything after it is loaded, where both are ordinary memory: a full fence, as
/// `fence(SeqCst)` is one. For races in which each of two sides stores what it says, and then loads what the other one says: one of them at
/// least finds it.
///
/// On x86-64 `fence` is `mfence`, which also orders what nobody here has, and lets nothing behind it begin for so long. A locked instruction is
/// what systems have for this: guests' kernels do the same on their side. Stores past the caches are settled before
/// ([`settle_streams`](crate::settle_streams)), as for every other store that tells of them.
#[inline]
pub fn full_fence() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: what lies at the stack pointer is this thread's own and stays as it is; a locked instruction waits until all stores before it
    // are seen, and no load behind it comes first. Without `nomem` the compiler keeps memory in this order as well.
    unsafe {
        std::arch::asm!("lock or dword ptr [rsp], 0", options(nostack));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use std::{
        hint,
        sync::atomic::{
            AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
        thread,
        time::Duration,
    };

    use super::full_fence;

    /// Both begin a round at the same time, and look at both answers when both are there.
    #[test]
    fn one_of_two_sides_finds_what_the_other_says() {
        // Each one's two meetings may cost a time slice where others keep the processors busy.
        const ROUNDS: u64 = if cfg!(miri) { 20 } else { 500 };
        let zeroes = || [AtomicU64::new(0), AtomicU64::new(0)];
        let (arrived, said, found) = (zeroes(), zeroes(), zeroes());
        let meet = |ours: usize, step: u64| {
            arrived[ours].store(step, Release);
            for look in 1.. {
                match arrived[1 - ours].load(Acquire) {
                    there if there >= step => return,
                    _ if look % 1000 == 0 => thread::sleep(Duration::from_micros(10)),
                    _ => hint::spin_loop(),
                }
            }
        };
        let missed = |ours: usize| {
            let is_missed = |round: &u64| {
                meet(ours, round * 2);
                said[ours].store(*round, Relaxed);
                full_fence();
                found[ours].store(said[1 - ours].load(Relaxed), Relaxed);
                meet(ours, round * 2 + 1);
                found.iter().all(|found| found.load(Relaxed) != *round)
            };
            (1..=ROUNDS).filter(is_missed).count()
        };
        let (one, other) = thread::scope(|scope| {
            let other = scope.spawn(|| missed(0));
            (missed(1), other.join())
        });
        assert_eq!((one, other.ok()), (0, Some(0)));
    }
}
