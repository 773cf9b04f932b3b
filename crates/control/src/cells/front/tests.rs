//! What is answered by whom, with a worker as others have it and cells that are played.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::channel,
    },
};

use axum::Json;
use millrace_keeper::Link;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};
use serde_json::json;
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixListener,
    sync::Notify,
};

use super::*;
use crate::{
    api,
    cells::{Arranged, LOOK, Unsaid},
    config::IsolationMode,
    dirs::API_SOCKET,
    manager::{
        CHANGES, Step,
        tests::{HUNG, PATIENCE, manager_in},
    },
    upgrade::{UpgradeSpec, UpgradeState, UpgradeView},
};

/// A daemon's own worker with isolation; its API is in its run directory.
pub(crate) struct Rig {
    directory: TempDir,
    manager: Arc<Manager>,
    pub(crate) cells: Arc<Cells>,
    keeper: Option<OwnedFd>,
}

/// What a cell says that has none of what it is asked for.
pub(crate) fn nothing() -> Response {
    Json(json!([])).into_response()
}

impl Rig {
    /// How a keeper says to a worker that it begins on trial.
    pub(crate) const ON_TRIAL: u64 = 1 << 34;

    fn new() -> Self {
        Self::of(&Arranged::default(), 0)
    }

    /// With these cells, of which none answers; `how` it begins.
    pub(crate) fn of(arranged: &Arranged, how: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, keeper) = pair.unwrap();
        // The word for a worker to begin, in the first version of what keepers say.
        let mut begin = [[6_u32, 0, 0, 1].map(u32::to_le_bytes).concat(), vec![0; 48]].concat();
        begin[32..40].copy_from_slice(&how.to_le_bytes());
        send(&keeper, &begin, SendFlags::NOSIGNAL).unwrap();
        let link = Arc::new(Link::begin(ours, &[]).unwrap());
        let manager = manager_in(directory.path());
        let folders = (directory.path().to_owned(), directory.path().to_owned());
        let cells = Cells::new(IsolationMode::Tenant, folders, &link, &manager, arranged);
        let router = front(api::router(Arc::clone(&manager)), &cells);
        let listener = UnixListener::bind(directory.path().join(API_SOCKET)).unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { directory, manager, cells, keeper: Some(keeper) }
    }

    /// The keeper's end, for who speaks as it does.
    pub(crate) fn keeper(&mut self) -> OwnedFd {
        self.keeper.take().unwrap()
    }

    pub(crate) fn say_settled(keeper: &impl AsFd) {
        let settled = [[13_u32, 0, 0, 1].map(u32::to_le_bytes).concat(), vec![0; 48]].concat();
        send(keeper, &settled, SendFlags::NOSIGNAL).unwrap();
    }

    /// A cell of this name that answers so, from now on.
    pub(crate) fn cell(&self, name: &str, answer: impl Fn(&Method, &str) -> Response + Clone + Send + Sync + 'static) {
        let own = folder(self.directory.path(), &name.parse().unwrap());
        std::fs::create_dir_all(&own).unwrap();
        let listener = UnixListener::bind(own.join(API_SOCKET)).unwrap();
        let answer = move |request: Request| {
            let answer = answer.clone();
            async move { answer(request.method(), request.uri().path()) }
        };
        tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
    }

    pub(crate) async fn get(&self, path: &str) -> String {
        let answer = ask(self.directory.path(), Method::GET, path, Bytes::new(), PATIENCE).await.unwrap();
        let body = to_bytes(answer.into_response().into_body(), usize::MAX).await.unwrap();
        String::from_utf8(body.into()).unwrap()
    }

    pub(crate) fn post(&self, path: &'static str, body: &Value) -> impl Future<Output = StatusCode> + use<> {
        let (directory, body) = (self.directory.path().to_owned(), body.to_string());
        async move { ask(&directory, Method::POST, path, body.into(), PATIENCE).await.unwrap().status }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.manager.shutdown();
    }
}

#[tokio::test]
async fn a_name_is_not_free_while_a_cell_may_have_it() {
    let volume = |name: &str| json!({ "name": name, "size": "1M", "backend": "memory" });
    let x: Name = "x".parse().unwrap();
    let rig = Rig::of(&Arranged::of([x.clone()].into()), 0);
    assert_eq!(rig.post("/v1/volumes", &volume("v")).await, StatusCode::SERVICE_UNAVAILABLE);
    let device = json!({ "name": "d", "nvme": {} });
    assert_eq!(rig.post("/v1/devices", &device).await, StatusCode::SERVICE_UNAVAILABLE);
    let shown = ask(rig.directory.path(), Method::GET, "/v1/volumes/v", Bytes::new(), PATIENCE).await.unwrap();
    assert_eq!(shown.status, StatusCode::SERVICE_UNAVAILABLE, "nobody can say that there is none");
    rig.cell("x", |_, _| nothing());
    assert_eq!(rig.post("/v1/volumes", &volume("v")).await, StatusCode::CREATED);
    // After a start of the daemon its state says what it has.
    let mut stored = Unsaid::default();
    stored.note(Kind::Volumes, &"v".parse().unwrap(), None);
    let rig = Rig::of(&Arranged { stored: [(x.clone(), stored)].into(), ..Arranged::of([x].into()) }, 0);
    assert_eq!(rig.post("/v1/volumes", &volume("v")).await, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(rig.post("/v1/volumes", &volume("w")).await, StatusCode::CREATED);
}

#[tokio::test]
async fn a_file_system_that_does_not_answer_keeps_no_other_change_waiting() {
    let rig = Rig::new();
    let path = rig.directory.path().join("a.img");
    let (release, hung) = channel::<()>();
    HUNG.lock().unwrap().insert(path.clone(), hung);
    let on_file = json!({ "name": "a", "size": "1M", "backend": format!("file:{}", path.display()) });
    let hangs = tokio::spawn(rig.post("/v1/volumes", &on_file));
    let looks = async {
        while HUNG.lock().unwrap().contains_key(&path) {
            tokio::time::sleep(LOOK).await;
        }
    };
    timeout(PATIENCE, looks).await.expect("a look that hangs");
    for (path, body) in [
        ("/v1/volumes", json!({ "name": "b", "size": "1M", "backend": "memory" })),
        ("/v1/devices", json!({ "name": "d", "nvme": {} })),
        ("/v1/devices/d/namespaces", json!({ "volume": "b" })),
    ] {
        assert_eq!(rig.post(path, &body).await, StatusCode::CREATED, "{path}");
    }
    assert!(!hangs.is_finished(), "it waits");
    drop(release);
    assert_eq!(hangs.await.unwrap(), StatusCode::CREATED);
}

/// A cell that hears, and does what it is told when it may. How often it was heard.
fn slow_cell(rig: &Rig, name: &Name) -> (Arc<AtomicUsize>, Arc<Notify>) {
    let own = folder(rig.directory.path(), name);
    std::fs::create_dir_all(&own).unwrap();
    let listener = UnixListener::bind(own.join(API_SOCKET)).unwrap();
    let (heard, may) = (Arc::<AtomicUsize>::default(), Arc::<Notify>::default());
    let shared = (Arc::clone(&heard), Arc::clone(&may));
    let answer = move |request: Request| {
        let (heard, may) = shared.clone();
        async move {
            if *request.method() == Method::GET {
                heard.fetch_add(1, Ordering::Relaxed);
            } else {
                may.notified().await;
            }
            nothing()
        }
    };
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
    (heard, may)
}

/// So that many of it are soon past.
const BRIEF: Duration = Duration::from_millis(1);

/// A cache is written back, for example.
#[tokio::test]
async fn what_takes_long_is_waited_for_as_long_as_the_cell_hears() {
    let (rig, x): (Rig, Name) = (Rig::new(), "x".parse().unwrap());
    let (heard, may) = slow_cell(&rig, &x);
    let cells = Arc::clone(&rig.cells);
    let change = tokio::spawn(async move {
        let asked = (Method::PATCH, "/v1/volumes/v");
        cells.ask_while_heard(&x, asked, Bytes::new(), BRIEF, BRIEF).await.map(|answer| answer.status)
    });
    let looked = async {
        while heard.load(Ordering::Relaxed) < 100 {
            sleep(LOOK).await;
        }
    };
    timeout(PATIENCE, looked).await.expect("a cell that is heard");
    assert!(!change.is_finished());
    may.notify_one();
    assert_eq!(change.await.unwrap().unwrap(), StatusCode::OK);
}

#[tokio::test]
async fn a_cell_that_is_not_heard_is_not_waited_for() {
    let (rig, x): (Rig, Name) = (Rig::new(), "x".parse().unwrap());
    let own = folder(rig.directory.path(), &x);
    std::fs::create_dir_all(&own).unwrap();
    // Nobody takes what comes.
    let _listener = UnixListener::bind(own.join(API_SOCKET)).unwrap();
    let asked = (Method::PATCH, "/v1/volumes/v");
    let change = rig.cells.ask_while_heard(&x, asked, Bytes::new(), BRIEF, BRIEF);
    let answer = timeout(PATIENCE, change).await.expect("an end");
    assert!(matches!(answer, Err(CellError::Silent)));
}

/// Others' changes have waited for it long enough, and it is not told as failed: it may be made yet.
#[tokio::test]
async fn a_change_that_goes_on_in_a_cell_is_told_so() {
    let (rig, x): (Rig, Name) = (Rig::new(), "x".parse().unwrap());
    let _cell = slow_cell(&rig, &x);
    let answer = rig.cells.asked(&x, (Method::POST, "/v1/volumes"), Bytes::new(), BRIEF).await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    let problem = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
    assert_eq!(serde_json::from_slice::<Problem>(&problem).unwrap().code, "still-under-way");
}

/// The same in this worker, for which others' changes wait no longer.
#[tokio::test]
async fn a_change_that_goes_on_in_this_worker_is_told_so() {
    let (may, done) = (Arc::<Notify>::default(), Arc::<Notify>::default());
    let shared = (Arc::clone(&may), Arc::clone(&done));
    let change = async move {
        shared.0.notified().await;
        shared.1.notify_one();
        nothing()
    };
    let answer = ended_within(BRIEF, change).await;
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    let problem: Problem = serde_json::from_slice(&to_bytes(answer.into_body(), usize::MAX).await.unwrap()).unwrap();
    assert!(problem.code == "still-under-way" && problem.detail.contains("worker main"), "{problem:?}");
    may.notify_one();
    timeout(PATIENCE, done.notified()).await.expect("a change that comes to its end");
    assert_eq!(ended_within(PATIENCE, async { nothing() }).await.status(), StatusCode::OK);
}

/// It asks for the keys of its volumes before, and their sources may take their time.
#[tokio::test]
async fn a_cell_that_takes_its_time_before_an_upgrade_is_upgraded() {
    let (rig, x): (Rig, Name) = (Rig::of(&Arranged::of(["x".parse().unwrap()].into()), 0), "x".parse().unwrap());
    let own = folder(rig.directory.path(), &x);
    std::fs::create_dir_all(&own).unwrap();
    let listener = UnixListener::bind(own.join(API_SOCKET)).unwrap();
    let running = UpgradeView::running(Uuid::new_v4(), Path::new("/bin/true"));
    let begun = Arc::<AtomicUsize>::default();
    let answer = move |request: Request| {
        let (begun, view) = (Arc::clone(&begun), running.clone());
        async move {
            if *request.method() == Method::POST {
                sleep(LIST_LIMIT + LIST_LIMIT / 4).await;
                begun.store(1, Ordering::Relaxed);
                return (StatusCode::ACCEPTED, Json(view)).into_response();
            }
            if begun.load(Ordering::Relaxed) == 0 {
                return StatusCode::NOT_FOUND.into_response();
            }
            Json(UpgradeView { state: UpgradeState::Done, ..view }).into_response()
        }
    };
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
    let spec = UpgradeSpec { binary: "/bin/true".into(), trial_seconds: None };
    rig.cells.upgrade_all(&spec).await.unwrap();
}

/// A cell that has nothing, and breaks off where it is to make something.
fn broken_cell(rig: &Rig, name: &Name) {
    let own = folder(rig.directory.path(), name);
    std::fs::create_dir_all(&own).unwrap();
    let listener = UnixListener::bind(own.join(API_SOCKET)).unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut heard = [0; 4096];
            let length = stream.read(&mut heard).await.unwrap();
            if heard[..length].starts_with(b"GET ") {
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]").await.unwrap();
            }
        }
    });
}

#[tokio::test]
async fn a_worker_that_may_be_making_a_device_yet_is_not_ended() {
    let (rig, x): (Rig, Name) = (Rig::new(), "x".parse().unwrap());
    let device = json!({ "name": "d", "nvme": {}, "tenant": "x" });
    broken_cell(&rig, &x);
    assert_eq!(rig.post("/v1/devices", &device).await, StatusCode::SERVICE_UNAVAILABLE);
    assert!(rig.cells.known().contains_key(&x), "nobody knows whether it makes it");
    let rig = Rig::new();
    rig.cell("x", |method, _| if *method == Method::GET { nothing() } else { StatusCode::CONFLICT.into_response() });
    assert_eq!(rig.post("/v1/devices", &device).await, StatusCode::CONFLICT);
    assert!(!rig.cells.known().contains_key(&x), "it has refused, and has nothing");
}

#[tokio::test]
async fn a_move_that_was_begun_needs_no_other_place() {
    let rig = Rig::new();
    let (cell, look) = (Place::Cell("x".parse().unwrap()), || Step::Look { volume: "none".to_owned() });
    let first = rig.cells.place_for_move(&cell, &Place::Main).await.unwrap();
    assert!(first.is_some());
    let mut others = Vec::new();
    for _ in 1..CHANGES {
        others.push(rig.manager.places().of_move().await.unwrap());
    }
    let refused = rig.cells.place_for_move(&Place::Main, &cell).await.unwrap_err();
    assert_eq!(refused.code, "too-many-changes");
    for held in [first.as_ref(), None] {
        let looked = rig.cells.step(&Place::Main, look(), held).await;
        let answer = looked.map_err(Problem::from).unwrap_err();
        assert_eq!(answer.code, "no-volume", "it was done");
    }
}

#[tokio::test]
async fn nothing_is_done_for_who_has_waited_for_too_long_or_has_gone() {
    let change = Mutex::new(());
    let is_told_no = |turn: Result<MutexGuard<'_, ()>, Problem>| turn.is_err_and(|problem| problem.status == 503);
    let exchanged = watch::Sender::new(false);
    let under_way = change.lock().await;
    let (asker, mut gone) = oneshot::channel();
    assert!(is_told_no(turn((&change, &exchanged), &mut gone, Duration::ZERO).await));
    let waits = turn((&change, &exchanged), &mut gone, PATIENCE);
    drop(asker);
    assert!(is_told_no(waits.await));
    drop(under_way);
    let (asker, mut gone) = oneshot::channel();
    drop(asker);
    let its = turn((&change, &exchanged), &mut gone, PATIENCE).await;
    assert!(is_told_no(its), "its turn has come, and nobody waits for it");
    let (_asker, mut gone) = oneshot::channel();
    assert!(turn((&change, &exchanged), &mut gone, PATIENCE).await.is_ok());
}

#[tokio::test]
async fn who_waits_while_this_worker_is_exchanged_is_told_so() {
    let (change, exchanged) = (Mutex::new(()), watch::Sender::new(false));
    let ((_asker, mut gone), (_other, mut theirs)) = (oneshot::channel(), oneshot::channel());
    let upgrade = change.lock().await;
    let code = |turn: Result<MutexGuard<'_, ()>, Problem>| turn.map(drop).unwrap_err().code;
    let waits = turn((&change, &exchanged), &mut gone, PATIENCE);
    let (waited, _) = tokio::join!(waits, async { exchanged.send_replace(true) });
    assert_eq!(code(waited), "upgrading");
    assert_eq!(code(turn((&change, &exchanged), &mut theirs, PATIENCE).await), "upgrading", "who comes later, too");
    exchanged.send_replace(false);
    drop(upgrade);
    assert!(turn((&change, &exchanged), &mut gone, PATIENCE).await.is_ok(), "it has failed");
}

#[tokio::test]
async fn who_writes_an_account_is_told_before_it_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let cells: [Name; 2] = ["x", "gone"].map(|name| name.parse().unwrap());
    let own = folder(directory.path(), &cells[0]);
    std::fs::create_dir_all(&own).unwrap();
    let listener = UnixListener::bind(own.join(API_SOCKET)).unwrap();
    let cell = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut heard = [0; 4096];
        let length = stream.read(&mut heard).await.unwrap();
        stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await.unwrap();
        String::from_utf8_lossy(&heard[..length]).into_owned()
    });
    // One that does not answer keeps nobody from it.
    expect_usage(directory.path(), cells.into()).await;
    assert!(cell.await.unwrap().starts_with("POST /cell/usage "));
}
