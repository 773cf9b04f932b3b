//! Where keys come from.

use std::{fs, os::unix::fs::PermissionsExt as _, time::Duration};

use crate::{KeyError, KeySource, Secret};

fn load(source: &str) -> Result<Secret<32>, KeyError> {
    source.parse::<KeySource>()?.load()
}

#[test]
fn files_hold_bytes_or_digits() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("key");
    let source = format!("file:{}", path.display());
    let key: Vec<u8> = (100..132).collect();
    let digits = key.iter().fold(String::new(), |digits, byte| digits + &format!("{byte:02x}"));
    for content in [key.clone(), digits.clone().into_bytes(), format!("{}\n", digits.to_uppercase()).into_bytes()] {
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(load(&source).unwrap().bytes(), &key[..]);
    }
    for content in [&b""[..], b"short", &[7; 31], &[7; 33], &[b'x'; 64], &[b'a'; 65], &[0; 4096]] {
        fs::write(&path, content).unwrap();
        let refused = load(&source).unwrap_err();
        assert!(matches!(refused, KeyError::NoKey { .. }), "{refused}");
        assert!(refused.to_string().contains("64 hexadecimal digits"), "{refused}");
    }
    fs::remove_file(&path).unwrap();
    let missing = load(&source).unwrap_err().to_string();
    assert!(missing.contains(&source) && missing.contains("No such file"), "{missing}");
    assert!(missing.contains("head -c 32 /dev/urandom") && missing.contains("no other key opens it"), "{missing}");
}

#[test]
fn who_may_not_read_a_key_is_told_what_allows_it() {
    let refused =
        |from: &str| KeyError::Io { from: from.to_owned(), source: std::io::ErrorKind::PermissionDenied.into() }.to_string();
    let file = refused("file:/etc/key");
    assert!(file.contains("must be allowed to read it") && file.contains("serve --allow PATH"), "{file}");
    let command = refused("command:/bin/cat /etc/key");
    assert!(command.contains("--key-command names") && !command.contains("read it"), "{command}");
    let missing = KeyError::Io { from: "keyring:vm-7".to_owned(), source: std::io::Error::from_raw_os_error(libc::ENOKEY) };
    assert!(missing.to_string().contains("keyctl padd user"), "{missing}");
    // Of this nothing is known.
    assert!(refused("keyring:vm-7").ends_with("permission denied"));
}

#[test]
fn commands_print_keys() {
    let digits = "5a".repeat(32);
    assert_eq!(load(&format!("command:/bin/echo {digits}")).unwrap().bytes(), &[0x5a; 32]);
    let failed = load("command:/bin/cat /nonexistent/key").unwrap_err();
    assert!(matches!(failed, KeyError::Command { .. }) && failed.to_string().contains("No such file"), "{failed}");
    assert!(matches!(load("command:/nonexistent/program").unwrap_err(), KeyError::Io { .. }));
    assert!(matches!(load("command:/bin/cat /dev/zero").unwrap_err(), KeyError::Command { .. } | KeyError::NoKey { .. }));
}

#[test]
fn a_command_that_hangs_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let script = |text: &str| {
        let path = directory.path().join("hangs");
        fs::write(&path, text).unwrap();
        path
    };
    // By itself; by what it has started; with its output closed; with one that it leaves behind.
    for text in ["sleep 1000", "sleep 1000 | cat", "exec >&- 2>&-; sleep 1000", "sleep 1000 & exit 0"] {
        let line = format!("/bin/sh {}", script(text).display());
        let source: KeySource = format!("command:{line}").parse().unwrap();
        let error = source.run(&line, &mut [0; 80], Duration::from_secs(1)).unwrap_err();
        let expected = format!("the key command {source} was killed: it has not ended within 1 s");
        assert_eq!(error.to_string(), expected, "{text}");
    }
}

/// Puts a key into this process's own keyring.
fn add_key(name: &str, key: &[u8]) -> bool {
    const PROCESS_KEYRING: i64 = -2;
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: two strings that end in zero, and the payload with its length.
    let id = unsafe {
        libc::syscall(libc::SYS_add_key, c"user".as_ptr(), name.as_ptr(), key.as_ptr(), key.len(), PROCESS_KEYRING)
    };
    id >= 0
}

#[test]
fn the_kernel_keeps_keys() {
    if !add_key("millrace-test", &[0x17; 32]) {
        // Containers often refuse keyrings; then the error must say so.
        let refused = load("keyring:millrace-test").unwrap_err();
        assert!(matches!(refused, KeyError::Io { .. }), "{refused}");
        return eprintln!("skipped: keys that the kernel has: it takes none here");
    }
    assert_eq!(load("keyring:millrace-test").unwrap().bytes(), &[0x17; 32]);
    let missing = load("keyring:millrace-no-such-key").unwrap_err().to_string();
    assert!(missing.starts_with("the key cannot be had from keyring:millrace-no-such-key"), "{missing}");
}

#[test]
fn only_sources_are_sources() {
    for text in ["", "0011", "file:", "file:relative", "keyring:", "command:ls", "env:KEY", "keyring:a\0b"] {
        let refused = text.parse::<KeySource>().unwrap_err().to_string();
        assert!(refused.contains("file:PATH, keyring:NAME and command:PROGRAM are possible"), "{refused}");
        assert!(refused.ends_with("where PATH and PROGRAM are absolute (begin with /)"), "{refused}");
    }
    // A key in the place of its source, and behind the name of one.
    let digits = "4f3a".repeat(16);
    for text in [digits.clone(), format!("file:{digits}"), format!("{digits}:"), format!("key of vm 7:{digits}")] {
        let refused = text.parse::<KeySource>().unwrap_err();
        assert!(!refused.to_string().contains("4f3a") && !format!("{refused:?}").contains("4f3a"), "{refused}");
    }
    for text in ["file:/etc/key", "keyring:vm-7", "command:/usr/bin/fetch-key vm 7"] {
        assert_eq!(text.parse::<KeySource>().unwrap().to_string(), text);
    }
}
