//! Commands that are found together go to the volume together, as far as it does them at once.

use std::{
    collections::BTreeMap,
    os::unix::fs::FileExt as _,
    sync::{
        Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use millrace_block::{ByteOffset, Request, Step, TaskContext, Transfer, Volume, yield_now};
use millrace_memory::Segment;

use millrace_nvme_spec::command::CommandId;

use super::*;

/// A volume that does so many together at most, and lets every third one wait that comes alone, unless it only looks at something then.
struct Few {
    inner: Arc<dyn Volume>,
    most: usize,
    look: Option<Look>,
    /// Those that were asked for by themselves.
    single: AtomicUsize,
    together: AtomicUsize,
    alone: AtomicUsize,
}

type Look = Box<dyn Fn() + Send + Sync>;

impl Volume for Few {
    millrace_block::passes_on!(inner);

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if let Some(look) = &self.look {
            look();
            return self.inner.submit(cx, request);
        }
        if !self.alone.fetch_add(1, Ordering::Relaxed).is_multiple_of(3) {
            return self.inner.submit(cx, request);
        }
        Step::Wait(cx.scratch.place_future(async move {
            yield_now().await;
            self.inner.submit(cx, request).await
        }))
    }

    fn submit_many(&self, requests: &mut [Request<'_>]) -> usize {
        let most = self.most.min(requests.len());
        let done = self.inner.submit_many(&mut requests[..most]);
        self.together.fetch_add(done, Ordering::Relaxed);
        done
    }

    fn do_one(&self, transfer: Transfer, at: ByteOffset, data: Segment) -> bool {
        self.single.fetch_add(1, Ordering::Relaxed);
        self.inner.do_one(transfer, at, data)
    }

    fn scratch_bytes(&self) -> usize {
        1024 + self.inner.scratch_bytes()
    }
}

fn few(most: usize) -> (FakeGuest, Arc<Few>) {
    few_in(FakeGuest::boot(), most, None)
}

fn few_in(mut guest: FakeGuest, most: usize, look: Option<Look>) -> (FakeGuest, Arc<Few>) {
    let inner = MemoryVolume::create("inner", SIZE, BlockSize::B512).expect("a volume");
    let few = Arc::new(Few {
        inner,
        most,
        look,
        single: AtomicUsize::new(0),
        together: AtomicUsize::new(0),
        alone: AtomicUsize::new(0),
    });
    guest.add_volume(1, Arc::clone(&few) as Arc<dyn Volume>);
    guest.make_queues(1, 64);
    (guest, few)
}

/// Pushes a write of a buffer at some address: two pages that lie apart, one page, or a range behind the end.
fn push(guest: &mut FakeGuest, at: u64, seed: u8) -> (u16, Option<Vec<u8>>) {
    let (blocks, outside) = (if at % 7 == 3 { 16 } else { 8 }, at % 11 == 5);
    let slba = if outside { SIZE / 512 - 1 } else { at * 16 };
    let data = pattern(blocks as usize * 512, seed ^ at as u8);
    let first = guest.alloc_pages(1);
    guest.alloc_pages(1);
    let second = guest.alloc_pages(1);
    guest.write(first, &data[..4096]);
    guest.write(second, &data[4096..]);
    let mut sqe = command(NvmOpcode::WRITE, slba, blocks);
    (sqe.dptr.prp1, sqe.dptr.prp2) = (first, second);
    (guest.push(1, sqe), (!outside).then_some(data))
}

#[test]
fn all_of_them_end_whatever_the_volume_does_at_once() {
    for most in [1, 2, 5, 16] {
        let (mut guest, few) = few(most);
        for seed in 0..12 {
            let expected: BTreeMap<_, _> = (0..60).map(|at| push(&mut guest, at, seed)).collect();
            let first = *expected.keys().next().expect("the first of sixty");
            guest.ring(1);
            let mut ended = BTreeMap::new();
            while ended.len() < expected.len() {
                let cqe = guest.wait(1);
                assert!(ended.insert(cqe.cid.0, cqe.status()).is_none(), "command {} ended twice", cqe.cid.0);
            }
            for (cid, data) in &expected {
                let status = ended[cid];
                assert_eq!(status.is_success(), data.is_some(), "command {cid}: {status}");
                if let Some(data) = data {
                    assert!(read(&mut guest, u64::from(cid - first) * 16, data.len()) == *data, "command {cid}");
                }
            }
        }
        assert_eq!((in_flight(&guest), guest.controller.in_flight), (0, 0));
        let together = few.together.load(Ordering::Relaxed);
        assert!(together >= 12 * most.min(3), "{together} were done together, {most} at a time");
    }
}

#[test]
fn one_by_itself_is_done_at_once() {
    let (mut guest, few) = few(1);
    let mut push_one = |at| {
        push(&mut guest, at, 0);
        guest.ring(1);
        assert!(guest.wait(1).status().is_success());
        [&few.single, &few.together, &few.alone].map(|count| count.load(Ordering::Relaxed))
    };
    assert_eq!(push_one(0), [1, 0, 0]);
    // In two pieces of memory.
    assert_eq!(push_one(3), [1, 0, 1]);
}

/// As a session's commands go by its caps.
#[test]
fn one_by_itself_goes_the_way_that_its_namespace_is_led_to() {
    let ((mut guest, straight), (_, way)) = (few(1), few(1));
    guest.controller.namespaces.lead(1, Some(Arc::clone(&way) as Arc<dyn Volume>));
    push(&mut guest, 0, 0);
    guest.ring(1);
    assert!(guest.wait(1).status().is_success());
    assert_eq!([&way, &straight].map(|few| few.single.load(Ordering::Relaxed)), [1, 0]);
}

#[test]
fn an_identifier_that_is_in_use_is_refused_in_the_middle_of_others() {
    let (mut guest, _few) = few(2);
    let buffer = guest.alloc_pages(1);
    let commands: Vec<_> = (0..12).map(|at| (at, if at == 4 { 2 } else { at })).collect();
    for (at, cid) in &commands {
        let mut sqe = command(NvmOpcode::READ, u64::from(*at) * 8, 8);
        sqe.dptr.prp1 = buffer;
        sqe.cid = CommandId(*cid);
        guest.push_as_is(1, &sqe);
    }
    guest.ring(1);
    let statuses: Vec<_> = commands.iter().map(|_| guest.wait(1)).map(|cqe| (cqe.cid.0, cqe.status())).collect();
    let refused = statuses.iter().filter(|(_, status)| !status.is_success()).count();
    // The third waits, alone, so its number is in use when the fifth comes.
    assert_eq!(refused, 1, "{statuses:?}");
    assert!(statuses.iter().filter(|(cid, _)| *cid == 2).count() == 2, "{statuses:?}");
}

/// The guest can go on with the first half of what it asked for while the other is worked on.
#[test]
fn the_first_of_many_are_posted_while_others_are_worked_on() {
    assert_eq!(posted_at_each_of(16), [0; 16]);
    assert_eq!(posted_at_each_of(20), [[0; 16].as_slice(), &[16; 4]].concat());
    // In turns of 32 at most, so that other queues get theirs.
    assert_eq!(posted_at_each_of(40), [[0; 20].as_slice(), &[20; 12], &[32; 8]].concat());
    assert_eq!(posted_at_each_of(63), [[0; 31].as_slice(), &[31; 1], &[32; 16], &[48; 15]].concat());
}

/// How many completions had been posted when each of so many requests came to the volume.
fn posted_at_each_of(requests: u64) -> Vec<usize> {
    let guest = FakeGuest::boot();
    let memory = guest.memory.try_clone().expect("another handle");
    // Where the completion queue is, once it is made.
    let (place, seen) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Vec::new())));
    let (at, posted) = (Arc::clone(&place), Arc::clone(&seen));
    let look = move || {
        let mut entries = [0; 64 * Cqe::SIZE];
        memory.read_exact_at(&mut entries, at.load(Ordering::Relaxed)).expect("guest memory");
        let count = entries.chunks(Cqe::SIZE).filter(|entry| entry[14] & 1 == 1).count();
        posted.lock().expect("no test panicked").push(count);
    };
    let (mut guest, _few) = few_in(guest, 0, Some(Box::new(look)));
    place.store(guest.queues[&1].cq_base - MEMORY_BASE, Ordering::Relaxed);
    let buffer = guest.alloc_pages(1);
    for at in 0..requests {
        let mut sqe = command(NvmOpcode::READ, at * 8, 8);
        sqe.dptr.prp1 = buffer;
        guest.push(1, sqe);
    }
    guest.ring(1);
    (0..requests).for_each(|_| assert!(guest.wait(1).status().is_success()));
    std::mem::take(&mut *seen.lock().expect("no test panicked"))
}
