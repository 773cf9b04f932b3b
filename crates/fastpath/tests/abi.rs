//! The header, the manual page and what is installed agree with the library: every function, structure and constant.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use millrace_tests::repository;

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
    let mut pieces = header.split("/*");
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

/// A type of the library as C has it, with the space before a name.
fn in_c(rust: &str) -> String {
    if let Some(to) = rust.strip_prefix("*const ") {
        return format!("const {}*", in_c(to));
    }
    if let Some(to) = rust.strip_prefix("*mut ") {
        return format!("{}*", in_c(to));
    }
    let name = match rust {
        "c_int" => "int",
        "c_uint" => "unsigned int",
        "c_char" => "char",
        "c_void" => "void",
        "usize" => "size_t",
        "u64" => "uint64_t",
        "i64" => "int64_t",
        "Handle" => "fastpath_t",
        "Piece" => "struct iovec",
        "COptions" => "struct fastpath_options",
        "CRequest" => "struct fastpath_request",
        "CCompletion" => "struct fastpath_completion",
        "CLatencies" => "struct fastpath_latencies",
        "CStatistics" => "struct fastpath_statistics",
        other => panic!("{other} has no counterpart in C"),
    };
    format!("{name} ")
}

/// Names with their types, of arguments or fields.
fn typed(list: &str) -> Vec<(&str, String)> {
    let items = list.split(',').map(str::trim).filter(|item| !item.is_empty());
    items.map(|item| item.split_once(": ").expect("a name and its type")).map(|(name, rust)| (name, in_c(rust))).collect()
}

/// The library's functions as C declares them, by their names.
fn functions(source: &str) -> Vec<(String, String)> {
    let exported = source.split("#[unsafe(no_mangle)]").skip(1);
    let function = |text: &str| {
        let (_, rest) = text.split_once("extern \"C\" fn ")?;
        let (name, rest) = rest.split_once('(')?;
        let (arguments, rest) = rest.split_once(')')?;
        let result = rest.split_once('{')?.0.trim().strip_prefix("-> ").map_or_else(|| "void ".to_owned(), in_c);
        let types: Vec<_> = typed(arguments).into_iter().map(|(_, c)| c.trim_end().to_owned()).collect();
        let types = if types.is_empty() { "void".to_owned() } else { types.join(", ") };
        Some((name.to_owned(), format!("{result}{name}({types});")))
    };
    exported.map(|text| function(text).expect("a function")).collect()
}

/// The library's constants for C, with their values.
fn constants(source: &str) -> Vec<(&str, &str)> {
    let lines = source.lines().filter_map(|line| line.strip_prefix("const FP_")?.strip_suffix(';'));
    lines.map(|line| line.split_once(": c_uint = ").expect("a number")).collect()
}

/// C that compiles only where the header says of each of the library's items what the library says.
fn comparison(source: &str) -> String {
    let mut c = "#include <millrace.h>\n".to_owned();
    for (name, declaration) in functions(source) {
        // The first line fails where there is none in the header, the second where there is another one.
        writeln!(c, "void *const has_{name} = (void *){name};\n{declaration}").unwrap();
    }
    for (name, value) in constants(source) {
        writeln!(c, "_Static_assert(FP_{name} == {value}u, \"FP_{name}\");").unwrap();
    }
    for text in source.split("\nstruct C").skip(1) {
        let (name, rest) = text.split_once(" {").expect("a structure");
        let (fields, _) = rest.split_once("\n}").expect("its end");
        let (fields, theirs) = (typed(fields), in_c(&format!("C{name}")));
        let list: Vec<_> = fields.iter().map(|(field, c)| format!("{c}{field};")).collect();
        writeln!(c, "struct of_{name} {{ {} }};", list.join(" ")).unwrap();
        writeln!(c, "_Static_assert(sizeof(struct of_{name}) == sizeof({theirs}), \"{name}\");").unwrap();
        for (field, _) in fields {
            let kind = |of: &str| format!("__typeof__((({of} *)0)->{field})");
            let (ours, theirs_kind) = (kind(&format!("struct of_{name}")), kind(&theirs));
            writeln!(c, "_Static_assert(__builtin_types_compatible_p({ours}, {theirs_kind}), \"{name}.{field}\");").unwrap();
            let places = format!("offsetof(struct of_{name}, {field}) == offsetof({theirs}, {field})");
            writeln!(c, "_Static_assert({places}, \"{name}.{field}\");").unwrap();
        }
    }
    c
}

#[test]
fn the_header_says_what_the_library_has() {
    let source = read("src/ffi.rs");
    let ours: BTreeSet<String> = functions(&source).into_iter().map(|(name, _)| name).collect();
    assert_eq!(declared(), ours, "the functions of include/millrace.h, and those of src/ffi.rs");
    let library = library_dir().join("libmillrace.so");
    let symbols = said_by(Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(&library));
    let exported: BTreeSet<String> = symbols.lines().filter_map(|line| Some(line.split(' ').next()?.to_owned())).collect();
    assert_eq!(exported, ours, "what {} has for others", library.display());
    let header = bare(&read("include/millrace.h"));
    let there: BTreeSet<&str> = words(&header, "FP_").map(|(name, _)| name.trim_start_matches("FP_")).collect();
    let here: BTreeSet<&str> = constants(&source).into_iter().map(|(name, _)| name).collect();
    assert_eq!(there, here, "the constants of include/millrace.h, and those of src/ffi.rs");

    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("comparison.c");
    fs::write(&program, comparison(&source)).unwrap();
    let mut command = Command::new("cc");
    command
        .args(["-std=gnu11", "-fsyntax-only", "-Wall", "-Werror", "-I"])
        .arg(repository().join("crates/fastpath/include"));
    said_by(command.arg(program));
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
        println!("skipped the rest: no pkg-config on PATH");
        return;
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
    let mut program = Command::new(dir.path().join("program"));
    program.env("LD_LIBRARY_PATH", prefix.join("lib")).env("MILLRACE_RUN_DIR", dir.path()).env("MILLRACE_VOLUME", "v");
    assert_eq!(said_by(&mut program).trim(), pkg_config(&["--modversion"]));
}
