//! Those who stand at the door: some of each user's are heard at a time, so that one who says nothing keeps only his own waiting.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Heard at a time, of all users and of one.
const HEARD: usize = 64;
const HEARD_OF_ONE: usize = 8;
/// Of one user at most, and of all, each of whom has a descriptor; who comes after them is turned away.
const WAITING_OF_ONE: usize = 256;
const WAITING: usize = 1024;

/// See the module.
pub(super) struct Line {
    all: Arc<Semaphore>,
    users: Mutex<HashMap<u32, User>>,
}

struct User {
    waiting: usize,
    heard: Arc<Semaphore>,
}

/// Somebody's place in the line.
pub(super) struct Place {
    line: Arc<Line>,
    uid: u32,
    heard: Arc<Semaphore>,
}

/// It is somebody's turn, until this is dropped.
pub(super) struct Heard {
    // Before the place: a user who has none left is forgotten with the permits that are out.
    _permits: [OwnedSemaphorePermit; 2],
    _place: Place,
}

impl Line {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { all: Arc::new(Semaphore::new(HEARD)), users: Mutex::default() })
    }

    /// `None`: too many of the user's wait, or of all.
    pub(super) fn join(self: &Arc<Self>, uid: u32) -> Option<Place> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        if users.values().map(|user| user.waiting).sum::<usize>() >= WAITING {
            return None;
        }
        let user = users.entry(uid).or_insert_with(|| User { waiting: 0, heard: Arc::new(Semaphore::new(HEARD_OF_ONE)) });
        if user.waiting == WAITING_OF_ONE {
            return None;
        }
        user.waiting += 1;
        Some(Place { line: Arc::clone(self), uid, heard: Arc::clone(&user.heard) })
    }
}

impl Place {
    /// Waits for its turn.
    pub(super) async fn turn(self) -> Option<Heard> {
        let own = Arc::clone(&self.heard).acquire_owned().await.ok()?;
        let all = Arc::clone(&self.line.all).acquire_owned().await.ok()?;
        Some(Heard { _permits: [own, all], _place: self })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut users = self.line.users.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(user) = users.get_mut(&self.uid) {
            user.waiting -= 1;
            if user.waiting == 0 {
                users.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn one_user_keeps_no_other_from_the_door() {
        let line = Line::new();
        let mut heard = Vec::new();
        for _ in 0..HEARD_OF_ONE {
            heard.push(line.join(1).expect("room").turn().await.expect("a turn"));
        }
        let mut waiting: Vec<Place> = (HEARD_OF_ONE..WAITING_OF_ONE).map(|_| line.join(1).expect("room")).collect();
        assert!(line.join(1).is_none(), "too many");
        let next = waiting.pop().expect("one of them");
        assert!(timeout(Duration::from_millis(50), next.turn()).await.is_err(), "it waits for its like");
        let other = timeout(Duration::from_secs(10), line.join(2).expect("room").turn()).await;
        let other = other.expect("at once");
        assert!(other.is_some());
        heard.pop();
        let next = waiting.pop().expect("one of them");
        assert!(timeout(Duration::from_secs(10), next.turn()).await.expect("its turn").is_some());
        drop((heard, waiting, other));
        assert!(line.users.lock().unwrap().is_empty());
        let all: Vec<Place> = (0..WAITING as u32).map(|uid| line.join(uid).expect("room")).collect();
        assert!(line.join(u32::MAX).is_none(), "too many of all");
        drop(all);
    }
}
