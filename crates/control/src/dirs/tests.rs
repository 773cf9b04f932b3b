use std::os::unix::{fs::PermissionsExt, net::UnixListener};

use super::*;

#[test]
fn a_run_directory_has_one_daemon_and_is_private() {
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("a/run");
    let taken = RunDir::take(&path, None).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(matches!(RunDir::take(&path, None), Err(DirError::InUse { path: named }) if named == path));
    drop(taken);
    RunDir::take(&path, None).unwrap();
}

#[test]
fn an_old_socket_goes_and_anything_else_stays() {
    let temporary = tempfile::tempdir().unwrap();
    let run = RunDir::take(temporary.path(), None).unwrap();
    let socket = temporary.path().join(API_SOCKET);
    drop(UnixListener::bind(&socket).unwrap());
    assert_eq!(run.api_socket(false).unwrap(), socket);
    assert!(!socket.exists());
    fs::write(&socket, "precious").unwrap();
    assert!(matches!(run.api_socket(false), Err(DirError::NotASocket { path }) if path == socket));
    assert_eq!(fs::read(&socket).unwrap(), b"precious");
}

#[test]
fn a_path_that_is_no_directory_is_named() {
    let temporary = tempfile::tempdir().unwrap();
    let file = temporary.path().join("file");
    fs::write(&file, "").unwrap();
    let error = RunDir::take(&file, None).unwrap_err().to_string();
    assert!(error.contains(file.to_str().unwrap()) && error.contains("create the directory"), "{error}");
}
