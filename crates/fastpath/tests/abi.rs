//! The header is made of the library's source; the manual page and what is installed agree with it.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use millrace_tests::{repository, skip};

/// Where cargo has put the library for this test.
fn library_dir() -> PathBuf {
    let test = std::env::current_exe().expect("the test's own path");
    test.parent().expect("tests are in a folder").to_path_buf()
}

fn read(path: &str) -> String {
    fs::read_to_string(repository().join("crates/fastpath").join(path)).expect("a text file")
}

fn said_by(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Without comments of C.
fn bare(header: &str) -> String {
    let code = header.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n");
    let mut pieces = code.split("/*");
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |bare, piece| bare + piece.split_once("*/").expect("comments end").1)
}

/// Words of a text that begin with `prefix`, each with what follows it.
fn words<'a>(text: &'a str, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    text.match_indices(prefix).filter_map(move |(at, _)| {
        let (before, word) = text.split_at(at);
        let (word, after) = word.split_at(word.find(|letter| !is_part(letter)).unwrap_or(word.len()));
        (!before.ends_with(is_part)).then_some((word, after))
    })
}

/// The functions that the header declares.
fn declared() -> BTreeSet<String> {
    let header = bare(&read("include/millrace.h"));
    words(&header, "fastpath_").filter(|(_, after)| after.starts_with('(')).map(|(name, _)| name.to_owned()).collect()
}

/// What `include/millrace.h` is to be.
fn header() -> String {
    let fastpath = repository().join("crates/fastpath");
    let config = cbindgen::Config::from_file(fastpath.join("cbindgen.toml")).expect("cbindgen.toml");
    let source = fastpath.join("src/ffi.rs");
    let made = cbindgen::Builder::new().with_config(config).with_src(&source).generate();
    let mut text = Vec::new();
    made.unwrap_or_else(|error| panic!("{}: {error}", source.display())).write(&mut text);
    String::from_utf8(text).expect("text")
}

#[test]
fn the_header_is_made_of_the_library() {
    let (path, made) = (repository().join("crates/fastpath/include/millrace.h"), header());
    if std::env::var_os("MILLRACE_WRITE_HEADER").is_some() {
        fs::write(&path, &made).expect("a header that can be written");
    }
    let there = read("include/millrace.h");
    let differs = there.lines().zip(made.lines()).find(|(there, made)| there != made);
    assert!(there == made, "it has {differs:?}; MILLRACE_WRITE_HEADER=1 with this test makes {} anew", path.display());

    let library = library_dir().join("libmillrace.so");
    let symbols = said_by(Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(&library));
    let exported: BTreeSet<String> = symbols.lines().filter_map(|line| Some(line.split(' ').next()?.to_owned())).collect();
    assert_eq!(exported, declared(), "what {} has for others, and what the header declares", library.display());
    let said = said_by(Command::new("readelf").arg("--dynamic").arg(&library));
    assert!(said.contains("soname: [libmillrace.so.0]"), "{said}");
}

#[test]
fn what_is_installed_is_taken_away_again() {
    let dir = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let mut install = Command::new(repository().join("scripts/install-fastpath"));
        install.args(arguments).env("MILLRACE_LIBRARIES", library_dir()).env("DESTDIR", dir.path());
        said_by(&mut install);
        said_by(Command::new("find").arg(dir.path()).args(["!", "-type", "d"]))
    };
    let installed = run(&["/usr"]);
    for path in ["/usr/lib/libmillrace.so", "/usr/lib/libmillrace.so.0", "/usr/include/millrace.h"] {
        assert!(installed.lines().any(|line| line.ends_with(path)), "{path} is not among\n{installed}");
    }
    assert_eq!(run(&["--remove", "/usr"]), "");
}

#[test]
fn what_is_installed_is_found_by_pkg_config_and_documented() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("prefix");
    let mut install = Command::new(repository().join("scripts/install-fastpath"));
    said_by(install.arg(&prefix).env("MILLRACE_LIBRARIES", library_dir()).env_remove("DESTDIR"));
    let page = fs::read_to_string(prefix.join("share/man/man3/fastpath.3")).unwrap();
    let named: BTreeSet<String> = words(&page, "fastpath_").map(|(name, _)| name.to_owned()).collect();
    let missing: Vec<_> = declared().into_iter().filter(|name| !named.contains(name)).collect();
    assert!(missing.is_empty(), "the manual page does not name {missing:?}");
    let is_program = |path: &Path| fs::metadata(path).is_ok_and(|found| found.permissions().mode() & 0o111 != 0);
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&path).any(|dir| is_program(&dir.join("pkg-config"))) {
        return skip("a program that pkg-config helps to build: there is none on PATH");
    }
    let pkg_config = |arguments: &[&str]| {
        let mut command = Command::new("pkg-config");
        said_by(command.args(arguments).arg("millrace").env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")))
            .trim()
            .to_owned()
    };
    let source = dir.path().join("program.c");
    let text = "#include <millrace.h>\n#include <stdio.h>\nint main(void) { return puts(fastpath_version()) < 0 || fastpath_alloc(1); }\n";
    fs::write(&source, text).unwrap();
    // As a Makefile has it: a shell reads what pkg-config says.
    let compile = format!("cc program.c -o program {}", pkg_config(&["--cflags", "--libs"]));
    said_by(Command::new("sh").args(["-c", &compile]).current_dir(dir.path()));
    // For the compiler alone.
    fs::remove_file(prefix.join("lib/libmillrace.so")).unwrap();
    let mut program = Command::new(dir.path().join("program"));
    program.env("LD_LIBRARY_PATH", prefix.join("lib")).env("MILLRACE_RUN_DIR", dir.path()).env("MILLRACE_VOLUME", "v");
    assert_eq!(said_by(&mut program).trim(), pkg_config(&["--modversion"]));
}
