//! The API as its clients have it: over a real socket, with a real manager behind it.

use std::{collections::BTreeSet, sync::mpsc::channel, time::Duration};

use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, open};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    runtime::Runtime,
    task::JoinHandle,
    time::timeout,
};

use super::*;
use crate::manager::{
    CHANGES, CHANGES_OF_ONE, SUMS,
    tests::{HUNG, PATIENCE, manager_in},
};

struct Rig {
    runtime: Runtime,
    manager: Arc<Manager>,
    directory: TempDir,
}

impl Rig {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let manager = manager_in(directory.path());
        let listener = runtime.block_on(async { UnixListener::bind(directory.path().join("api.sock")).unwrap() });
        let router = router(Arc::clone(&manager));
        runtime.spawn(async move { axum::serve(listener, router).await });
        Self { runtime, manager, directory }
    }

    fn connect(&self) -> UnixStream {
        self.runtime.block_on(UnixStream::connect(self.directory.path().join("api.sock"))).unwrap()
    }

    /// Status, content type and body.
    fn raw(&self, method: Method, path: &str, body: &str) -> (u16, String, Bytes) {
        let stream = self.connect();
        self.runtime.block_on(exchange(stream, method, path.to_owned(), body.to_owned()))
    }

    fn json(&self, method: Method, path: &str, body: &Value) -> (u16, Value) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (status, _, body) = self.raw(method, path, &body);
        (status, if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() })
    }

    fn get(&self, path: &str) -> (u16, Value) {
        self.json(Method::GET, path, &Value::Null)
    }

    fn problem(&self, method: Method, path: &str, body: &str) -> (u16, Problem) {
        let (status, kind, body) = self.raw(method, path, body);
        let problem: Problem = serde_json::from_slice(&body).unwrap();
        assert_eq!((kind.as_str(), problem.status), ("application/problem+json", status));
        (status, problem)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.manager.shutdown();
    }
}

/// Status, content type and body of an answer.
async fn exchange(stream: UnixStream, method: Method, path: String, body: String) -> (u16, String, Bytes) {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
    let answer = sender.send_request(request.body(Full::new(Bytes::from(body))).unwrap()).await.unwrap();
    let kind = answer.headers().get("content-type").map(|kind| kind.to_str().unwrap().to_owned());
    (answer.status().as_u16(), kind.unwrap_or_default(), answer.into_body().collect().await.unwrap().to_bytes())
}

#[test]
fn a_disk_from_nothing_and_away_again() {
    let rig = Rig::new();
    assert_eq!(rig.get("/v1/volumes"), (200, json!([])));
    let (status, volume) = rig.json(
        Method::POST,
        "/v1/volumes",
        &json!({ "name": "a", "size": "1M", "backend": "memory", "block_size": 4096 }),
    );
    assert_eq!(
        (status, &volume["size"], &volume["block_size"], &volume["state"]),
        (201, &json!(1 << 20), &json!(4096), &json!("ready"))
    );
    assert_eq!(rig.get("/v1/volumes/a"), (200, volume.clone()));
    let (status, device) = rig.json(Method::POST, "/v1/devices", &json!({ "name": "d", "nvme": { "queues": 2 } }));
    assert_eq!((status, &device["connected"], &device["namespaces"]), (201, &json!(false), &json!([])));
    assert!(std::path::Path::new(device["socket"].as_str().unwrap()).exists());
    let (status, namespace) = rig.json(Method::POST, "/v1/devices/d/namespaces", &json!({ "volume": "a", "nsid": 3 }));
    assert_eq!((status, &namespace["nsid"], &namespace["volume"]), (201, &json!(3), &json!("a")));
    assert_eq!(rig.get("/v1/devices/d/namespaces/3"), (200, namespace.clone()));
    assert_eq!(rig.get("/v1/devices/d/namespaces"), (200, json!([namespace])));
    assert_eq!(rig.get("/v1/volumes/a").1["attached_to"], json!([{ "device": "d", "nsid": 3 }]));
    let (status, volume) = rig.json(Method::PATCH, "/v1/volumes/a", &json!({ "size": 2_097_152 }));
    assert_eq!((status, &volume["size"]), (200, &json!(2_097_152)));
    let (_, status) = rig.get("/v1/status");
    assert_eq!((&status["volumes"], &status["devices"], &status["failed"]), (&json!(1), &json!(1), &json!([])));
    assert_eq!(status["shards"].as_array().unwrap().len(), 1);
    for path in ["/v1/devices/d/namespaces/3", "/v1/devices/d", "/v1/volumes/a"] {
        assert_eq!(rig.json(Method::DELETE, path, &Value::Null), (204, Value::Null));
    }
    assert_eq!(rig.get("/v1/devices"), (200, json!([])));
}

#[test]
fn a_volume_is_copied() {
    let rig = Rig::new();
    for name in ["a", "b"] {
        rig.json(Method::POST, "/v1/volumes", &json!({ "name": name, "size": "1M", "backend": "memory" }));
    }
    let (status, copy) = rig.json(Method::POST, "/v1/copies", &json!({ "source": "a", "target": "b", "name": "job" }));
    assert_eq!((status, &copy["name"], &copy["bytes"]), (201, &json!("job"), &json!(1 << 20)));
    let copy = loop {
        let (status, copy) = rig.get("/v1/copies/job");
        assert_eq!(status, 200);
        if copy["state"] != "running" {
            break copy;
        }
    };
    assert_eq!((&copy["state"], &copy["done"], &copy["skipped"]), (&json!("done"), &json!(1 << 20), &json!(1 << 20)));
    let (status, problem) = rig.json(Method::PATCH, "/v1/copies/job", &json!({ "rate": "1M" }));
    assert_eq!((status, &problem["code"]), (409, &json!("not-now")), "it is done");
    assert_eq!(rig.get("/v1/copies"), (200, json!([copy])));
    let metrics = String::from_utf8(rig.raw(Method::GET, "/metrics", "").2.to_vec()).unwrap();
    assert!(metrics.contains("millrace_copy_done_bytes{copy=\"job\"} 1048576"), "{metrics}");
    assert_eq!(rig.json(Method::DELETE, "/v1/copies/job", &Value::Null), (204, Value::Null));
    assert_eq!(rig.get("/v1/copies"), (200, json!([])));
}

#[test]
fn groups_have_caps_and_metrics_tell_of_what_they_hold_back() {
    let rig = Rig::new();
    let spec = json!({ "name": "gold", "caps": { "iops": 20_000, "bandwidth": "1M" } });
    let (status, group) = rig.json(Method::POST, "/v1/groups", &spec);
    assert_eq!(
        (status, &group["caps"], &group["held_back"]),
        (201, &json!({ "iops": 20_000, "bandwidth": 1 << 20 }), &json!(0))
    );
    let (status, group) = rig.json(Method::PATCH, "/v1/groups/gold", &json!({ "caps": { "read_iops": 5 } }));
    assert_eq!((status, &group["caps"], &group["weight"]), (200, &json!({ "read_iops": 5 }), &json!(1)));
    let (status, group) = rig.json(Method::PATCH, "/v1/groups/gold", &json!({ "weight": 7 }));
    assert_eq!((status, &group["caps"], &group["weight"]), (200, &json!({ "read_iops": 5 }), &json!(7)));
    assert_eq!(rig.problem(Method::PATCH, "/v1/groups/gold", "{}").0, 422);
    let volume = json!({ "name": "a", "size": "1M", "stack": "throttle(group=gold) | memory" });
    assert_eq!(rig.json(Method::POST, "/v1/volumes", &volume).0, 201);
    let (status, problem) = rig.problem(Method::DELETE, "/v1/groups/gold", "");
    assert_eq!((status, problem.code.as_str(), problem.advice.is_some()), (409, "group-in-use", true));
    let (_, _, text) = rig.raw(Method::GET, "/metrics", "");
    let text = String::from_utf8(text.to_vec()).unwrap();
    for line in
        ["millrace_group_held_back_total{group=\"gold\"} 0", "millrace_volume_held_back_seconds_total{volume=\"a\"} 0"]
    {
        assert!(text.contains(line), "{text}");
    }
    assert_eq!(rig.problem(Method::GET, "/v1/groups/none", "").0, 404);
    rig.json(Method::DELETE, "/v1/volumes/a", &Value::Null);
    assert_eq!(rig.json(Method::DELETE, "/v1/groups/gold", &Value::Null).0, 204);
    assert_eq!(rig.get("/v1/groups"), (200, json!([])));
}

#[test]
fn who_may_open_volumes_is_said_and_unsaid() {
    let rig = Rig::new();
    rig.json(Method::POST, "/v1/volumes", &json!({ "name": "a", "size": "1M", "backend": "memory" }));
    let (status, app) = rig.json(Method::POST, "/v1/apps", &json!({ "uid": 5, "volumes": ["a"] }));
    let mut whole = json!({ "uid": 5, "volumes": ["a"], "read_only": false, "sessions": 64, "open": 0, "held_back": 0 });
    whole["source"] = json!("command");
    assert_eq!((status, &app), (201, &whole));
    assert_eq!(rig.problem(Method::POST, "/v1/apps", r#"{"uid":5,"volumes":["a"]}"#).1.code, "app-exists");
    let (status, app) = rig.json(Method::PATCH, "/v1/apps/5", &json!({ "read_only": true, "sessions": 2 }));
    assert_eq!(
        (status, &app["read_only"], &app["sessions"], &app["volumes"]),
        (200, &json!(true), &json!(2), &json!(["a"]))
    );
    assert_eq!((rig.get("/v1/apps/5"), rig.get("/v1/apps")), ((200, app.clone()), (200, json!([app]))));
    let caps = json!({ "iops": 5, "bandwidth": 1_000_000 });
    let (status, app) = rig.json(Method::PATCH, "/v1/apps/5", &json!({ "caps": &caps }));
    assert_eq!((status, &app["caps"], &app["sessions"]), (200, &caps, &json!(2)));
    let (_, _, text) = rig.raw(Method::GET, "/metrics", "");
    let text = String::from_utf8(text.to_vec()).unwrap();
    assert!(text.contains("millrace_app_held_back_total{user=\"5\"} 0"), "{text}");
    let (status, app) = rig.json(Method::PATCH, "/v1/apps/5", &json!({ "caps": {} }));
    assert_eq!((status, &app["caps"]), (200, &Value::Null), "none is in the place of all");
    assert_eq!(rig.json(Method::DELETE, "/v1/apps/5", &Value::Null), (204, Value::Null));
    assert_eq!(rig.get("/v1/apps"), (200, json!([])));
}

#[test]
fn what_goes_wrong_is_a_problem_with_its_status() {
    let rig = Rig::new();
    rig.json(Method::POST, "/v1/volumes", &json!({ "name": "a", "size": "1M", "backend": "memory" }));
    rig.json(Method::POST, "/v1/devices", &json!({ "name": "d", "nvme": {} }));
    rig.json(Method::POST, "/v1/devices/d/namespaces", &json!({ "volume": "a" }));
    let (post, patch, delete) = (Method::POST, Method::PATCH, Method::DELETE);
    for (method, path, body, status, code) in [
        (&Method::GET, "/v1/volumes/none", "", 404, "no-volume"),
        (&Method::GET, "/v1/volumes/%ff", "", 400, "bad-request"),
        (&delete, "/v1/devices/d/namespaces/%ff", "", 400, "bad-request"),
        (&Method::GET, "/v1/usage?from=2&to=1", "", 422, "bad-request"),
        (&Method::GET, "/v1/devices/none", "", 404, "no-device"),
        (&Method::GET, "/v1/devices/d/namespaces/2", "", 404, "not-attached"),
        (&Method::GET, "/v1/devices/d/namespaces/x", "", 400, "bad-request"),
        (&Method::GET, "/v1/apps/5", "", 404, "no-app"),
        (&Method::GET, "/v1/apps/me", "", 400, "bad-request"),
        (&post, "/v1/apps", r#"{"uid":5,"volumes":["none"]}"#, 404, "no-volume"),
        (&post, "/v1/apps", r#"{"uid":5,"volumes":["a"],"sessions":0}"#, 422, "invalid"),
        (&post, "/v1/apps", r#"{"uid":-1,"volumes":["a"]}"#, 422, "bad-request"),
        (&post, "/v1/apps", r#"{"uid":5,"volumes":["a"],"speed":1}"#, 422, "bad-request"),
        (&post, "/v1/apps", r#"{"uid":5,"volumes":["a"],"caps":{"iops":0}}"#, 422, "invalid"),
        (&patch, "/v1/apps/5", r#"{"sessions":1}"#, 404, "no-app"),
        (&delete, "/v1/apps/5", "", 404, "no-app"),
        (&Method::GET, "/v2/volumes", "", 404, "no-route"),
        (&Method::PUT, "/v1/volumes", "", 405, "no-method"),
        (&delete, "/v1/volumes/a", "", 409, "volume-attached"),
        (&post, "/v1/volumes", r#"{"name":"a","size":1,"backend":"null"}"#, 409, "volume-exists"),
        (&post, "/v1/volumes", r#"{"name":"b","size":1,"backend":"null"}"#, 422, "volume"),
        (&post, "/v1/volumes", r#"{"name":"b","backend":"null"}"#, 422, "invalid"),
        (&post, "/v1/volumes", r#"{"name":"b","size":512,"backend":"null","extra":1}"#, 422, "bad-request"),
        (&post, "/v1/volumes", r#"{"name":"../b","size":512,"backend":"null"}"#, 422, "bad-request"),
        (&post, "/v1/volumes", "{", 400, "bad-request"),
        (&post, "/v1/volumes", "[]", 422, "bad-request"),
        (&patch, "/v1/volumes/a", r#"{"size":"1Q"}"#, 422, "bad-request"),
        (&patch, "/v1/volumes/a", r#"{"size":1}"#, 422, "bad-size"),
        (&patch, "/v1/volumes/a", "{}", 422, "invalid"),
        (&patch, "/v1/volumes/a", r#"{"stack":"strip(null)"}"#, 422, "bad-request"),
        (&patch, "/v1/volumes/a", r#"{"stack":"memory","size":4096}"#, 422, "invalid"),
        (&patch, "/v1/volumes/a", r#"{"size":4096,"from":"memory"}"#, 422, "invalid"),
        (&patch, "/v1/volumes/a", r#"{"stack":"meter | memory","from":"null"}"#, 409, "changed-meanwhile"),
        (&post, "/v1/volumes/a/commands", r#"{"service":"stripe","command":"x"}"#, 422, "invalid"),
        (&Method::GET, "/v1/volumes/none/history", "", 404, "no-volume"),
        (&post, "/v1/copies", r#"{"source":"a","target":"none"}"#, 404, "no-volume"),
        (&post, "/v1/copies", r#"{"source":"a","target":"a"}"#, 422, "invalid"),
        (&post, "/v1/copies", r#"{"source":"a"}"#, 422, "bad-request"),
        (&post, "/v1/copies", r#"{"source":"a","target":"a","speed":1}"#, 422, "bad-request"),
        (&patch, "/v1/copies/none", r#"{"state":"paused"}"#, 404, "no-copy"),
        (&patch, "/v1/copies/none", r#"{"state":"fast"}"#, 422, "bad-request"),
        (&delete, "/v1/copies/none", "", 404, "no-copy"),
        (&post, "/v1/devices", r#"{"name":"d","nvme":{}}"#, 409, "device-exists"),
        (&post, "/v1/devices", r#"{"name":"e"}"#, 422, "bad-request"),
        (&post, "/v1/devices", r#"{"name":"e","nvme":{"queues":0}}"#, 422, "invalid"),
        (&post, "/v1/devices/d/namespaces", r#"{"volume":"none"}"#, 404, "no-volume"),
        (&post, "/v1/devices/d/namespaces", r#"{"volume":"a","nsid":9}"#, 409, "attached-already"),
        (&post, "/v1/devices/d/namespaces", r#"{"volume":"a","nsid":9999}"#, 422, "nsid-range"),
    ] {
        let (found, problem) = rig.problem(method.clone(), path, body);
        assert_eq!((found, problem.code.as_str()), (status, code), "{method} {path} {body}: {}", problem.detail);
    }
    let (_, problem) = rig.problem(Method::POST, "/v1/volumes", r#"{"name":"b","size":512,"backend":"null","siez":1}"#);
    assert!(problem.detail.contains("unknown field `siez`"), "{}", problem.detail);
    assert_eq!(rig.get("/v1/volumes").1.as_array().unwrap().len(), 1);
}

#[test]
fn large_bodies_and_broken_requests_cost_nothing() {
    let rig = Rig::new();
    let (status, problem) =
        rig.problem(Method::POST, "/v1/volumes", &format!("{{\"name\":\"{}\"}}", "x".repeat(BODY_LIMIT)));
    assert_eq!((status, problem.code.as_str()), (413, "bad-request"));
    for garbage in
        ["\0\0\0\0\r\n\r\n", "GET\r\n\r\n", "POST /v1/volumes HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"]
    {
        let mut stream = rig.connect();
        rig.runtime.block_on(async {
            stream.write_all(garbage.as_bytes()).await.unwrap();
            stream.shutdown().await.unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.unwrap();
            assert!(!answer.starts_with(b"HTTP/1.1 2"), "{}", String::from_utf8_lossy(&answer));
        });
    }
    // A client that never finishes its request does not keep others waiting.
    let mut stuck = rig.connect();
    rig.runtime.block_on(stuck.write_all(b"POST /v1/volumes HTTP/1.1\r\nhost: x\r\n")).unwrap();
    assert_eq!(rig.get("/v1/volumes"), (200, json!([])));
}

/// Each of them has a thread, as long as its file system does not answer.
#[test]
fn changes_that_hang_leave_threads_for_who_only_asks() {
    let rig = Rig::new();
    let paths: Vec<_> = (0..CHANGES).map(|number| rig.directory.path().join(format!("v{number}.img"))).collect();
    let mut releases = Vec::new();
    let mut hanging = Vec::new();
    for (number, path) in paths.iter().enumerate() {
        let (release, hung) = channel::<()>();
        HUNG.lock().unwrap().insert(path.clone(), hung);
        releases.push(release);
        let spec = json!({ "name": format!("v{number}"), "size": "4K", "backend": format!("file:{}", path.display()) });
        let request = exchange(rig.connect(), Method::POST, "/v1/volumes".to_owned(), spec.to_string());
        hanging.push(rig.runtime.spawn(request));
    }
    let all_hang = async {
        while paths.iter().any(|path| HUNG.lock().unwrap().contains_key(path)) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    rig.runtime.block_on(async { timeout(PATIENCE, all_hang).await }).expect("looks that hang");
    let another = json!({ "name": "m", "size": "1M", "backend": "memory" });
    let (status, problem) = rig.problem(Method::POST, "/v1/volumes", &another.to_string());
    assert_eq!((status, problem.code.as_str(), problem.advice.is_some()), (503, "too-many-changes", true));
    for path in ["/v1/status", "/v1/volumes", "/metrics"] {
        assert_eq!(rig.raw(Method::GET, path, "").0, 200, "{path}");
    }
    // What helps against it finds threads, and what may take long has places of its own.
    for path in ["/v1/devices/none", "/v1/devices/none/namespaces/1", "/v1/copies/none", "/v1/apps/9"] {
        assert_eq!(rig.problem(Method::DELETE, path, "").0, 404, "{path}");
    }
    assert_eq!(rig.problem(Method::PATCH, "/v1/copies/none", r#"{"state":"paused"}"#).0, 404);
    assert_eq!(rig.problem(Method::PATCH, "/v1/volumes/none", r#"{"size":"2M"}"#).0, 404);
    assert_eq!(rig.problem(Method::POST, "/v1/upgrade", r#"{"binary":"not/absolute"}"#).0, 422);
    drop(releases);
    for request in hanging {
        assert_eq!(rig.runtime.block_on(request).unwrap().0, 201);
    }
    assert_eq!(rig.json(Method::POST, "/v1/volumes", &another).0, 201);
    assert_eq!(rig.get("/v1/volumes").1.as_array().unwrap().len(), CHANGES + 1);
}

/// Whoever asks again and again for what hangs takes no more than a few of the places.
#[test]
fn changes_of_one_object_that_hang_leave_places_for_others() {
    let rig = Rig::new();
    let paths: Vec<_> = (0..CHANGES_OF_ONE).map(|number| rig.directory.path().join(format!("one{number}.img"))).collect();
    let create = |file: &str| json!({ "name": "a", "size": "4K", "backend": format!("file:{file}") }).to_string();
    let mut releases = Vec::new();
    let mut hanging = Vec::new();
    for path in &paths {
        let (release, hung) = channel::<()>();
        HUNG.lock().unwrap().insert(path.clone(), hung);
        releases.push(release);
        let request = exchange(rig.connect(), Method::POST, "/v1/volumes".to_owned(), create(&path.display().to_string()));
        hanging.push(rig.runtime.spawn(request));
    }
    let all_hang = async {
        while paths.iter().any(|path| HUNG.lock().unwrap().contains_key(path)) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    rig.runtime.block_on(async { timeout(PATIENCE, all_hang).await }).expect("looks that hang");
    let (status, problem) = rig.problem(Method::DELETE, "/v1/volumes/a", "");
    assert_eq!((status, problem.code.as_str()), (409, "too-many-of-one"));
    assert!(problem.detail.contains("volume a") && problem.advice.is_some(), "{problem:?}");
    let another = json!({ "name": "m", "size": "1M", "backend": "memory" });
    assert_eq!(rig.json(Method::POST, "/v1/volumes", &another).0, 201);
    drop(releases);
    let mut answers: Vec<_> = hanging.into_iter().map(|request| rig.runtime.block_on(request).unwrap().0).collect();
    answers.sort_unstable();
    assert_eq!(answers, [201, 409], "one of them has made it");
    assert_eq!(rig.json(Method::DELETE, "/v1/volumes/a", &Value::Null).0, 204);
}

/// An account of years is read for long, and who gives up waiting does not end that.
#[test]
fn sums_of_the_account_that_do_not_end_keep_nobody_else_from_an_answer() {
    let rig = Rig::new();
    // Of a cell, and whoever reads it waits for its end.
    let account = rig.directory.path().join("cells/x/usage.log");
    std::fs::create_dir_all(account.parent().unwrap()).unwrap();
    mknodat(CWD, &account, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let ask = |_| rig.runtime.spawn(exchange(rig.connect(), Method::GET, "/v1/usage".to_owned(), String::new()));
    let mut asked: Vec<_> = (0..=SUMS).map(ask).collect();
    let refused = async {
        loop {
            if let Some(at) = asked.iter().position(JoinHandle::is_finished) {
                return asked.swap_remove(at).await.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let (status, _, body) = rig.runtime.block_on(async { timeout(PATIENCE, refused).await }).expect("a refusal");
    let problem: Problem = serde_json::from_slice(&body).unwrap();
    assert_eq!((status, problem.code.as_str(), problem.advice.is_some()), (503, "too-many-sums", true));
    for path in ["/v1/status", "/v1/volumes", "/metrics"] {
        assert_eq!(rig.raw(Method::GET, path, "").0, 200, "{path}");
    }
    // Who opens it to write, and goes, is the end of it for those that have it open by then.
    let ended = async {
        while !asked.iter().all(JoinHandle::is_finished) {
            drop(open(&account, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    rig.runtime.block_on(async { timeout(PATIENCE, ended).await }).expect("the end of the account");
    for request in asked {
        assert_eq!(rig.runtime.block_on(request).unwrap().0, 200);
    }
}

#[test]
fn the_description_has_every_route() {
    let rig = Rig::new();
    let (status, description) = rig.get("/openapi.json");
    assert_eq!(status, 200);
    assert!(description["openapi"].as_str().unwrap().starts_with("3."));
    let paths: BTreeSet<_> = description["paths"].as_object().unwrap().keys().cloned().collect();
    let expected = [
        "/metrics",
        "/v1/apps",
        "/v1/apps/{uid}",
        "/v1/copies",
        "/v1/copies/{name}",
        "/v1/devices",
        "/v1/devices/{name}",
        "/v1/devices/{name}/namespaces",
        "/v1/devices/{name}/namespaces/{nsid}",
        "/v1/devices/{name}/state",
        "/v1/devices/{name}/trace",
        "/v1/groups",
        "/v1/groups/{name}",
        "/v1/status",
        "/v1/upgrade",
        "/v1/usage",
        "/v1/volumes",
        "/v1/volumes/{name}",
        "/v1/volumes/{name}/commands",
        "/v1/volumes/{name}/history",
        "/v1/volumes/{name}/migration",
        "/v1/volumes/{name}/trace",
    ];
    assert_eq!(paths, expected.map(str::to_owned).into());
    // So has the page for operators, and no other request.
    let requests = description["paths"].as_object().unwrap().iter().flat_map(|(path, methods)| {
        methods.as_object().unwrap().keys().map(move |method| format!("{} {path}", method.to_uppercase()))
    });
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api.md")).unwrap();
    let is_request = |code: &&str| code.starts_with(|letter: char| letter.is_ascii_uppercase()) && code.contains(" /");
    let shown: BTreeSet<_> = page.split('`').skip(1).step_by(2).filter(is_request).map(str::to_owned).collect();
    assert_eq!(shown, requests.collect::<BTreeSet<_>>(), "docs/api.md");
    // What it describes is there: no path is unknown, no method is refused.
    for (path, methods) in description["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            let path = path.replace("{name}", "none").replace("{nsid}", "1");
            let method: Method = method.to_uppercase().parse().unwrap();
            let (status, _, body) = rig.raw(method.clone(), &path, "{}");
            let text = String::from_utf8_lossy(&body);
            assert!(!text.contains("no-route") && !text.contains("no-method") && status < 500, "{method} {path}: {text}");
        }
    }
    let text = description.to_string();
    for reference in text.split("\"$ref\":\"").skip(1).map(|rest| rest.split('"').next().unwrap()) {
        let pointer = reference.strip_prefix('#').unwrap();
        assert!(description.pointer(pointer).is_some(), "{reference} leads nowhere");
    }
    for schema in
        ["VolumeSpec", "VolumeView", "DeviceSpec", "DeviceView", "AttachSpec", "NamespaceView", "Status", "Problem"]
    {
        assert!(description["components"]["schemas"][schema].is_object(), "{schema}");
    }
}

#[test]
fn metrics_are_open_metrics() {
    let rig = Rig::new();
    rig.json(Method::POST, "/v1/volumes", &json!({ "name": "a", "size": "1M", "backend": "memory" }));
    rig.json(Method::POST, "/v1/devices", &json!({ "name": "d", "nvme": {} }));
    let (status, kind, body) = rig.raw(Method::GET, "/metrics", "");
    let text = String::from_utf8(body.to_vec()).unwrap();
    assert_eq!((status, kind.as_str()), (200, metrics::CONTENT_TYPE));
    for line in [
        "millrace_volume_size_bytes{volume=\"a\"} 1048576",
        "millrace_device_connected{device=\"d\"} 0",
        "millrace_device_up{device=\"d\"} 1",
        "millrace_device_commands_total{device=\"d\",operation=\"read\"} 0",
        "millrace_device_transferred_bytes_total{device=\"d\",operation=\"write\"} 0",
        "millrace_device_errors_total{device=\"d\"} 0",
        "millrace_device_interrupts_total{device=\"d\"} 0",
        "millrace_shard_devices{shard=\"0\"} 1",
        "millrace_failed_objects 0",
        "millrace_degraded_objects 0",
        "# TYPE millrace_shard_busy_seconds counter",
        "# TYPE process_cpu_seconds counter",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
    assert!(text.lines().any(|line| line.starts_with("millrace_shard_turns_total{shard=\"0\"} ")));
}
