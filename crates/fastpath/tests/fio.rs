//! The engine for fio: Debian's fio from the private root, its verification, on a volume of a real daemon.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use millrace_tests::{Daemon, eventually, repository};

/// Compiles the engine, as scripts/fio-engine does, with the library of this test's profile.
fn compile(to: &Path, defines: &[&str]) {
    let test = std::env::current_exe().expect("the test's own path");
    let library = test.parent().expect("tests are in a folder").join("libmillrace.a");
    let crate_dir = repository().join("crates/fastpath");
    let mut command = Command::new("cc");
    command.args(["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-I"]);
    command.arg(crate_dir.join("include")).arg("-o").arg(to).arg(crate_dir.join("fio/engine.c")).arg(library);
    command.args(["-static-libgcc", "-Wl,-Bsymbolic", "-Wl,--exclude-libs,ALL", "-lpthread", "-ldl", "-lm"]).args(defines);
    let output = command.output().expect("running cc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

struct Fio {
    engine: PathBuf,
    run_dir: PathBuf,
}

impl Fio {
    fn run(&self, volume: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new(repository().join("scripts/in-root"));
        command.args(["fio", "--name=job", "--direct=1", "--group_reporting", "--filename", volume]);
        command.arg(format!("--ioengine=external:{}", self.engine.display())).args(arguments);
        // It leaves files behind.
        command.current_dir(&self.run_dir).env("MILLRACE_RUN_DIR", &self.run_dir).stdin(Stdio::null());
        command.output().expect("running fio: scripts/guest-root makes it")
    }

    fn must(&self, volume: &str, arguments: &[&str]) -> String {
        let output = self.run(volume, arguments);
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && said.contains("err= 0"), "fio {arguments:?}: {}\n{said}", output.status);
        said
    }
}

#[test]
fn fio_writes_and_verifies_by_our_engine() {
    let mut daemon = Daemon::start();
    let fio = Fio { engine: daemon.path("libmillrace-fio.so"), run_dir: daemon.run_dir() };
    compile(&fio.engine, &[]);
    let image = daemon.path("f.img");
    daemon.run(&["volume", "create", "f", "--size", "32M", "--backend", &format!("file:{}", image.display())]);
    daemon.run(&["volume", "create", "m", "--size", "32M", "--backend", "memory"]);
    let refused = fio.run("m", &["--rw=randread", "--bs=4k", "--io_size=1m", "--io_submit_mode=offload"]);
    assert!(refused.status.code().is_some_and(|code| code != 0), "its threads have no space: {refused:?}");
    for volume in ["f", "m"] {
        let verify = ["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--norandommap=0"];
        fio.must(
            volume,
            &[&["--rw=randwrite", "--bsrange=512-256k", "--bs_unaligned=0", "--iodepth=32"], &verify[..]].concat(),
        );
        fio.must(volume, &[&["--rw=randrw", "--bs=4k", "--iodepth=8", "--fsync=16", "--io_size=16m"], &verify[..]].concat());
    }
    // More than one command each, memory of fio's own, trims, several jobs with a space each.
    fio.must("m", &["--rw=write", "--bs=4m", "--iodepth=2", "--verify=crc32c", "--iomem=malloc"]);
    fio.must("m", &["--rw=randtrim", "--bs=64k", "--iodepth=4", "--io_size=4m"]);
    let said = fio.must("m", &["--rw=randread", "--bs=4k", "--iodepth=16", "--numjobs=3", "--thread", "--io_size=8m"]);
    assert!(said.contains("jobs=3"), "{said}");
    let none = fio.run("none", &["--rw=read", "--bs=4k"]);
    assert!(!none.status.success() && String::from_utf8_lossy(&none.stderr).contains("volume none does not exist"));
    let many = fio.run("m", &["--rw=read", "--bs=4k", "--iodepth=2000"]);
    assert!(!many.status.success() && String::from_utf8_lossy(&many.stderr).contains("iodepth is 1 to 1023"));
    let no_sessions = || daemon.json(&["device", "list"]).as_array().is_some_and(Vec::is_empty).then_some(());
    eventually("the sessions' devices are gone", no_sessions);
    daemon.expect_well();
}

/// The engine keeps ends that fio has not asked for, and meanwhile holds back requests: however fio goes about it, none stays there.
#[test]
fn fio_gets_the_end_of_all_that_it_begins() {
    let mut daemon = Daemon::start();
    let fio = Fio { engine: daemon.path("libmillrace-fio.so"), run_dir: daemon.run_dir() };
    compile(&fio.engine, &[]);
    daemon.run(&["volume", "create", "m", "--size", "32M", "--backend", "memory"]);
    let load = ["--rw=randwrite", "--bs=4k", "--io_size=4m", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1"];
    for (depth, more) in [
        ("--iodepth=32", &["--rate_iops=2000"][..]),
        ("--iodepth=32", &["--thinktime=1000", "--thinktime_blocks=7"]),
        ("--iodepth=32", &["--fsync=3"]),
        ("--iodepth=32", &["--iodepth_batch=16", "--iodepth_batch_complete_min=8"]),
        ("--iodepth=32", &["--iodepth_batch_complete_max=16"]),
        ("--iodepth=9", &["--iodepth_low=2"]),
        ("--iodepth=1", &[]),
    ] {
        fio.must("m", &[&load[..], &[depth], more].concat());
    }
    for depth in ["--iodepth=1", "--iodepth=32"] {
        let refused = fio.run("m", &["--rw=randread", "--bs=1000", depth, "--io_size=1m"]);
        let said = String::from_utf8_lossy(&refused.stdout);
        assert!(
            !refused.status.success() && said.contains("err=22"),
            "{said}\n{}",
            String::from_utf8_lossy(&refused.stderr)
        );
    }
    daemon.expect_well();
}

#[test]
fn fio_refuses_an_engine_of_another_interface_version() {
    let dir = tempfile::tempdir().unwrap();
    let fio = Fio { engine: dir.path().join("libmillrace-fio.so"), run_dir: dir.path().to_path_buf() };
    compile(&fio.engine, &["-DINTERFACE_VERSION=35"]);
    let refused = fio.run("m", &["--rw=read", "--bs=4k"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    // Before the engine has a say: it would tell of a daemon that is not there.
    assert!(!refused.status.success() && said.contains("bad ioops version 35 (want 36)"), "{}\n{said}", refused.status);
    assert!(!said.contains("millrace:"), "{said}");
}
