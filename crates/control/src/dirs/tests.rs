use std::os::unix::{fs::PermissionsExt, net::UnixListener};

use super::*;

/// A group that this process may give files to.
fn group() -> Group {
    let own = rustix::process::getegid().as_raw();
    let number = if rustix::process::geteuid().is_root() { own + 4242 } else { own };
    Group::find(&number.to_string()).unwrap()
}

fn rights(path: &Path) -> (u32, u32) {
    let found = fs::metadata(path).unwrap();
    (found.gid(), found.permissions().mode() & 0o7777)
}

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
fn a_directory_that_others_may_have_made_is_not_believed() {
    let temporary = tempfile::tempdir().unwrap();
    let (path, ours) = (temporary.path().join("run"), user());
    make_private(&path).unwrap();
    let seen_by = |user| is_anothers(&fs::symlink_metadata(&path).unwrap(), user);
    assert!(!seen_by(ours) && seen_by(ours + 1));
    // The systemd unit and who has programs of others at the door let others pass.
    for (mode, is_believed) in [(0o711, true), (0o755, true), (0o720, false), (0o777, false)] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(!seen_by(ours), is_believed, "{mode:o}");
    }
    std::os::unix::fs::symlink(&path, temporary.path().join("link")).unwrap();
    assert!(is_anothers(&fs::symlink_metadata(temporary.path().join("link")).unwrap(), ours), "it may lead elsewhere");
    // One that somebody has named is his own choice.
    trust_run_dir(&path).unwrap();
    // No user has this number.
    let nobody = u32::MAX - 7;
    let unseen = trust(&temporary_run_dir(nobody), nobody).unwrap_err();
    assert!(matches!(unseen, DirError::Io { ref source, .. } if source.kind() == io::ErrorKind::NotFound), "{unseen}");
}

#[test]
fn a_path_that_is_no_directory_is_named() {
    let temporary = tempfile::tempdir().unwrap();
    let file = temporary.path().join("file");
    fs::write(&file, "").unwrap();
    let error = RunDir::take(&file, None).unwrap_err().to_string();
    assert!(error.contains(file.to_str().unwrap()) && error.contains("create the directory"), "{error}");
}

#[test]
fn a_group_passes_through_what_is_made_for_it_and_not_through_what_is_others() {
    let (temporary, group) = (tempfile::tempdir().unwrap(), group());
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    mode(temporary.path(), 0o700);
    // Made here, or empty as if it were.
    let (made, empty) = (temporary.path().join("made"), temporary.path().join("empty"));
    fs::create_dir(&empty).unwrap();
    mode(&empty, 0o700);
    for path in [&made, &empty] {
        for _ in 0..2 {
            let_through(path, &group).unwrap();
            assert_eq!(rights(path), (group.gid(), 0o710));
            let _taken = RunDir::take(path, None).unwrap();
        }
    }
    assert_eq!(closed_to(&made, group.gid()).as_deref(), Some(temporary.path()), "what it is in counts as well");
    mode(temporary.path(), 0o711);
    assert_ne!(closed_to(&made, group.gid()).as_deref(), Some(temporary.path()));
    // Something is in it, or somebody has said who may: it stays as it is.
    let (used, said, link) = (temporary.path().join("used"), temporary.path().join("said"), temporary.path().join("link"));
    for (path, rights) in [(&used, 0o700), (&said, 0o750)] {
        fs::create_dir(path).unwrap();
        mode(path, rights);
    }
    fs::write(used.join("letter"), "").unwrap();
    fs::remove_dir_all(&empty).unwrap();
    fs::create_dir(&empty).unwrap();
    mode(&empty, 0o700);
    std::os::unix::fs::symlink(&empty, &link).unwrap();
    let before = [&used, &said, &empty].map(|path| rights(path));
    for path in [&used, &said, &link] {
        let_through(path, &group).unwrap();
    }
    assert_eq!([&used, &said, &empty].map(|path| rights(path)), before);
    assert_eq!(closed_to(&used, group.gid()), Some(used));
}
