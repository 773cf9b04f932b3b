use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

/// A group that this process may give files to; the one that they have anyway, unless it is root.
fn group() -> u32 {
    let own = rustix::process::getegid().as_raw();
    if rustix::process::geteuid().is_root() { own + 4242 } else { own }
}

fn rights(path: &Path) -> (u32, u32) {
    let found = std::fs::symlink_metadata(path).unwrap();
    (found.gid(), found.permissions().mode() & 0o7777)
}

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

#[test]
fn a_group_may_connect_too_and_keeps_that() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let mut listener = Listener::bind_for(&path, Some(group())).unwrap();
    assert_eq!(rights(&path), (group(), 0o660));
    let _client = UnixStream::connect(&path).unwrap();
    assert!(listener.accept().unwrap().is_some());
    // One that was made without: whoever takes it over lets them in.
    listener.withdraw();
    let mut closed = Listener::bind(&path).unwrap();
    assert_eq!(rights(&path).1, 0o600);
    let kept = closed.as_fd().try_clone_to_owned().unwrap();
    std::mem::forget(closed.take_place());
    let resumed = Listener::resume(kept, &path).unwrap();
    for _ in 0..2 {
        resumed.open_to(group()).unwrap();
        assert_eq!(rights(&path), (group(), 0o660));
    }
}

#[test]
fn what_has_come_to_its_path_is_given_to_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let (path, other) = (directory.path().join("socket"), directory.path().join("other"));
    let listener = Listener::bind(&path).unwrap();
    let _other = Listener::bind(&other).unwrap();
    std::fs::remove_file(&path).unwrap();
    symlink(&other, &path).unwrap();
    let error = listener.open_to(group()).unwrap_err();
    assert!(error.to_string().starts_with(&path.display().to_string()), "{error}");
    assert_eq!(rights(&other).1, 0o600);
}

#[test]
fn a_group_that_its_owner_is_not_in_is_an_error_and_nothing_stays() {
    if rustix::process::geteuid().is_root() {
        // Root may give files to all.
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let error = Listener::bind_for(&path, Some(u32::MAX - 10)).unwrap_err();
    assert!(error.to_string().contains("giving it to its group"), "{error}");
    assert!(!path.exists());
}
