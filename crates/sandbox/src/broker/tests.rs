//! Requests that no worker of ours sends, and some that it does.

use std::{
    fs,
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::UnixListener,
    },
};

use super::*;

const ANY: Sockets<'_> = Sockets { folders: None, group: None };
const HERE: u64 = (libc::AT_FDCWD as i64).cast_unsigned();

/// A request with what its arguments lead to.
fn ask(number: libc::c_long, args: &[u64], lens: &[(usize, u32)], bytes: &[u8], fds: &[OwnedFd]) -> Result<Reply, Errno> {
    let mut head = Head { number, args: [0; ARGS], lens: [NOTHING; ARGS] };
    head.args[..args.len()].copy_from_slice(args);
    for (at, len) in lens {
        head.lens[*at] = *len;
    }
    // SAFETY: the head is what is sent as bytes; it has no padding.
    let raw = unsafe { std::slice::from_raw_parts((&raw const head).cast::<u8>(), size_of::<Head>()) };
    make(&[raw, bytes].concat(), fds, ANY)
}

fn with_zero(path: &Path) -> Vec<u8> {
    [path.as_os_str().as_bytes(), b"\0"].concat()
}

fn len(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap()
}

#[test]
fn a_file_is_opened_read_and_named() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("file");
    fs::write(&path, "text").unwrap();
    let text = with_zero(&path);
    let flags = u64::from(libc::O_RDONLY.cast_unsigned());
    let opened = ask(libc::SYS_openat, &[HERE, 0, flags, 0], &[(1, len(&text))], &text, &[]).unwrap();
    assert_eq!(fs::read_to_string(format!("/proc/self/fd/{}", opened.fds[0].as_raw_fd())).unwrap(), "text");
    // Its own name leads to the file, whatever its number is here.
    let name = ask(libc::SYS_readlinkat, &[HERE, 0, 0, 4096], &[(1, OWN), (2, 4096)], &[], &opened.fds).unwrap();
    assert_eq!(&name.bytes[..usize::try_from(name.result).unwrap()], path.as_os_str().as_bytes());
    let status =
        ask(libc::SYS_fstatfs, &[0, 0], &[(0, 0), (1, size_of::<libc::statfs>() as u32)], &[], &opened.fds).unwrap();
    assert_eq!((status.result, status.bytes.len()), (0, size_of::<libc::statfs>()));
}

#[test]
fn pairs_come_as_two() {
    let pair = ask(libc::SYS_pipe2, &[0, 0], &[(0, 8)], &[], &[]).unwrap();
    assert_eq!((pair.result, pair.fds.len()), (0, 2));
}

#[test]
fn what_is_wrong_is_refused_before_any_call() {
    let text = with_zero(Path::new("/dev/null"));
    let refused =
        |number, args: &[u64], lens: &[(usize, u32)], bytes: &[u8]| ask(number, args, lens, bytes, &[]).unwrap_err();
    // A call of nobody's, none, and half a head.
    assert_eq!(refused(libc::SYS_execve, &[], &[], &[]), Errno::NOSYS);
    assert_eq!(refused(-1, &[], &[], &[]), Errno::NOSYS);
    assert_eq!(make(&[0; 20], &[], ANY).unwrap_err(), Errno::INVAL);
    // Numbers of descriptors that did not come: ours are not theirs to name.
    assert_eq!(refused(libc::SYS_openat, &[0, 0, 0, 0], &[(1, len(&text))], &text), Errno::BADF);
    assert_eq!(refused(libc::SYS_fsync, &[1], &[], &[]), Errno::BADF);
    assert_eq!(refused(libc::SYS_readlinkat, &[HERE, 0, 0, 9], &[(1, OWN), (2, 9)], &[]), Errno::BADF);
    // Lengths that are not what came, or what the table says.
    for wrong in [0, 4097, 100, u32::MAX - 2] {
        assert_eq!(refused(libc::SYS_openat, &[HERE, 0, 0, 0], &[(1, wrong)], &text), Errno::INVAL, "{wrong}");
    }
    assert_eq!(refused(libc::SYS_uname, &[0], &[(0, 8)], &[]), Errno::INVAL);
    assert_eq!(refused(libc::SYS_pipe2, &[0, 0], &[(0, 4)], &[]), Errno::INVAL);
    assert_eq!(refused(libc::SYS_getcwd, &[0, 8], &[(0, 4096)], &[]), Errno::INVAL);
    assert_eq!(refused(libc::SYS_getcwd, &[0, 1 << 40], &[(0, 1 << 20)], &[]), Errno::INVAL);
    // A room that says to be larger than it is, is as large as it is.
    let socket = OwnedFd::from(UnixListener::bind(tempfile::tempdir().unwrap().path().join("s")).unwrap());
    let said = 1_000_000_u32.to_ne_bytes();
    let named = ask(libc::SYS_getsockname, &[0, 0, 0], &[(0, 0), (1, 16), (2, 4)], &said, &[socket]).unwrap();
    assert_eq!((named.result, named.bytes.len()), (0, 20));
    // No length at all, where the call wants one.
    let socket = OwnedFd::from(UnixListener::bind(tempfile::tempdir().unwrap().path().join("s")).unwrap());
    assert_eq!(ask(libc::SYS_getsockname, &[0, 0, 0], &[(0, 0), (1, 16)], &[], &[socket]).unwrap_err(), Errno::FAULT);
    // Nowhere stays nowhere: the kernel says so.
    assert_eq!(refused(libc::SYS_openat, &[HERE, 0xdead_0000, 0, 0], &[], &[]), Errno::FAULT);
}

#[test]
fn modes_are_changed_of_sockets_only_and_in_the_folders() {
    let place = tempfile::tempdir().unwrap();
    let (socket, file, link) = (place.path().join("socket"), place.path().join("file"), place.path().join("link"));
    let _listener = UnixListener::bind(&socket).unwrap();
    fs::write(&file, "text").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let folders = [place.path().canonicalize().unwrap()];
    let elsewhere = [PathBuf::from("/nonexistent")];
    let change = |path: &Path, mode: u64, folders: Option<&[PathBuf]>| {
        let fd = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        change_mode(&fd, mode, Sockets { folders, group: None })
    };
    change(&socket, 0o640, Some(&folders)).unwrap();
    change(&socket, 0o666, None).unwrap();
    assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o7777, 0o666);
    assert_eq!(change(&socket, 0o600, Some(&elsewhere)), Err(NOT_ALLOWED));
    assert_eq!(change(&socket, 0o4755, None), Err(NOT_ALLOWED));
    // A descriptor that only names it is no way around.
    let fd: OwnedFd = rustix::fs::open(&socket, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let head = Head { number: libc::SYS_fchmod, args: [0, 0o600, 0, 0, 0, 0], lens: [NOTHING; ARGS] };
    // SAFETY: as in `ask`.
    let raw = unsafe { std::slice::from_raw_parts((&raw const head).cast::<u8>(), size_of::<Head>()) };
    let change_open =
        |folders: &[PathBuf]| make(raw, std::slice::from_ref(&fd), Sockets { folders: Some(folders), group: None });
    assert_eq!(change_open(&elsewhere).unwrap_err(), NOT_ALLOWED);
    assert_eq!(change_open(&folders).unwrap().result, 0);
    for path in [&file, &link] {
        assert_eq!(change(path, 0o600, None), Err(NOT_ALLOWED));
    }
}

#[test]
fn sockets_are_given_to_one_group_only_and_nothing_else_is() {
    let place = tempfile::tempdir().unwrap();
    let (socket, file) = (place.path().join("socket"), place.path().join("file"));
    let _listener = UnixListener::bind(&socket).unwrap();
    fs::write(&file, "text").unwrap();
    let before = fs::metadata(&file).unwrap();
    let own = before.gid();
    // Root may give files to all groups, others to their own.
    let group = if before.uid() == 0 { own + 4242 } else { own };
    let folders = [place.path().canonicalize().unwrap()];
    let elsewhere = [PathBuf::from("/nonexistent")];
    let number = libc::SYS_fchownat;
    let give = |path: &Path, [owner, wanted, flags]: [u32; 3], sockets| {
        let text = with_zero(path);
        let args = [HERE, 0, owner.into(), wanted.into(), flags.into(), 0];
        let mut head = Head { number, args, lens: [NOTHING; ARGS] };
        head.lens[1] = len(&text);
        // SAFETY: as in `ask`.
        let raw = unsafe { std::slice::from_raw_parts((&raw const head).cast::<u8>(), size_of::<Head>()) };
        make(&[raw, &text].concat(), &[], sockets).map(|reply| reply.result)
    };
    let (nobody, may) = (forms::NOBODY, Sockets { folders: Some(&folders), group: Some(group) });
    assert_eq!(give(&socket, [nobody, group, 0], may), Ok(0));
    assert_eq!(fs::metadata(&socket).unwrap().gid(), group);
    for asked in
        [[0, group, 0], [nobody, group + 1, 0], [nobody, nobody, 0], [nobody, group, libc::AT_EMPTY_PATH.cast_unsigned()]]
    {
        assert_eq!(give(&socket, asked, may), Err(NOT_ALLOWED), "{asked:?}");
    }
    assert_eq!(give(&socket, [nobody, group, 0], ANY), Err(NOT_ALLOWED), "no group was named");
    assert_eq!(give(&socket, [nobody, group, 0], Sockets { folders: Some(&elsewhere), ..may }), Err(NOT_ALLOWED));
    assert_eq!(give(&file, [nobody, group, 0], may), Err(NOT_ALLOWED));
    assert_eq!(fs::metadata(&file).unwrap().gid(), own);
}
