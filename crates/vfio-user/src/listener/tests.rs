use std::os::unix::fs::PermissionsExt;

use super::*;

#[test]
fn only_the_owner_may_connect_and_the_path_goes_with_the_listener() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = Listener::bind(&path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(listener.path(), path);
    assert!(listener.accept().unwrap().is_none());
    let _client = UnixStream::connect(&path).unwrap();
    assert!(listener.accept().unwrap().is_some());
    drop(listener);
    assert!(!path.exists());
}

#[test]
fn a_live_socket_is_left_alone_and_a_stale_one_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let live = Listener::bind(&path).unwrap();
    assert!(matches!(Listener::bind(&path), Err(ListenerError::InUse { .. })));
    assert!(path.exists());
    drop(live);
    // What a killed process leaves behind.
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let next = Listener::bind(&path).unwrap();
    UnixStream::connect(next.path()).unwrap();
}

#[test]
fn other_files_and_bad_paths_are_errors_that_name_the_path() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(Listener::bind(&path), Err(ListenerError::NotASocket { .. })));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    for bad in [directory.path().join("missing/socket"), directory.path().join("x".repeat(200))] {
        let error = Listener::bind(&bad).unwrap_err();
        assert!(error.to_string().starts_with(&bad.display().to_string()), "{error}");
    }
}

#[test]
fn a_successors_path_is_not_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let old = Listener::bind(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let _new = Listener::bind(&path).unwrap();
    drop(old);
    UnixStream::connect(&path).unwrap();
}

#[test]
fn a_path_that_was_given_up_is_free_and_stays_its_next_owners() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let mut old = Listener::bind(&path).unwrap();
    let _client = UnixStream::connect(&path).unwrap();
    old.withdraw();
    assert!(!path.exists());
    let next = Listener::bind(&path).unwrap();
    assert!(old.accept().unwrap().is_some(), "who has connected stays");
    old.withdraw();
    drop(old);
    UnixStream::connect(&path).unwrap();
    assert!(next.accept().unwrap().is_some());
}
