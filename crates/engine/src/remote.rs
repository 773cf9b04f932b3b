//! A task waits for an answer from another thread.
#![forbid(unsafe_code)]

use std::{
    cell::RefCell,
    future::Future,
    pin::Pin,
    rc::Rc,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, Waker},
};

use crate::{
    device::ShardContext,
    mailbox::{Message, ShardHandle},
};

/// Wakers of the tasks of one shard that wait for other threads. Wakers must not leave the shard: senders know the number only.
#[derive(Clone, Default)]
pub(crate) struct Remotes(Rc<RefCell<Vec<Entry>>>);

#[derive(Default)]
struct Entry {
    used: bool,
    waker: Option<Waker>,
}

impl Remotes {
    fn take(&self) -> u32 {
        let mut entries = self.0.borrow_mut();
        let at = entries.iter().position(|entry| !entry.used).unwrap_or_else(|| {
            entries.push(Entry::default());
            entries.len() - 1
        });
        entries[at].used = true;
        at as u32
    }

    /// An answer has come. (It may be for a number that was given out again: then that task is polled for nothing.)
    pub(crate) fn wake(&self, id: u32) {
        let waker = self.0.borrow_mut().get_mut(id as usize).and_then(|entry| entry.waker.take());
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

enum Answer<T> {
    Awaited,
    Given(T),
    Never,
}

/// Gives the answer, from any thread. Dropping it unused gives the answer `None`.
pub struct RemoteSender<T: Send + 'static> {
    answer: Arc<Mutex<Answer<T>>>,
    shard: ShardHandle,
    id: u32,
}

impl<T: Send + 'static> RemoteSender<T> {
    /// Gives the answer.
    pub fn send(self, value: T) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Answer::Given(value);
        // Dropping it tells the shard.
    }
}

impl<T: Send + 'static> Drop for RemoteSender<T> {
    fn drop(&mut self) {
        {
            let mut answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
            if matches!(*answer, Answer::Awaited) {
                *answer = Answer::Never;
            }
        }
        // A shard that has stopped has nobody waiting.
        let _ = self.shard.send(Message::Answer(self.id));
    }
}

/// Awaits the answer; `None` when the sender was dropped without one.
#[must_use = "the answer is lost if nobody awaits it"]
pub struct RemoteAnswer<T> {
    answer: Arc<Mutex<Answer<T>>>,
    remotes: Remotes,
    id: u32,
}

impl<T> Future for RemoteAnswer<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        // The waker is registered before the look: an answer that the look misses comes with a message after it, and
        // messages are handled on this thread.
        self.remotes.0.borrow_mut()[self.id as usize].waker = Some(cx.waker().clone());
        let mut answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *answer, Answer::Never) {
            Answer::Given(value) => Poll::Ready(Some(value)),
            Answer::Never => Poll::Ready(None),
            Answer::Awaited => {
                *answer = Answer::Awaited;
                Poll::Pending
            }
        }
    }
}

impl<T> Drop for RemoteAnswer<T> {
    fn drop(&mut self) {
        self.remotes.0.borrow_mut()[self.id as usize] = Entry::default();
    }
}

/// A question to another thread: hand the sender over, and await the answer in a task of this shard. Allocates: for
/// administration, not for I/O.
pub fn remote<T: Send + 'static>(cx: &ShardContext<'_>) -> (RemoteSender<T>, RemoteAnswer<T>) {
    let answer = Arc::new(Mutex::new(Answer::Awaited));
    let remotes = cx.core().remotes.clone();
    let id = remotes.take();
    let sender = RemoteSender { answer: Arc::clone(&answer), shard: cx.handle().clone(), id };
    (sender, RemoteAnswer { answer, remotes, id })
}
