//! The translator's own promises: nothing that needs hardware tools.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{
    Circuit, PERIOD, llvm_ir,
    native::{NATIVE, Random},
    translate,
};

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn circuits() -> (Vec<Circuit>, String) {
    let scratch = tempfile::tempdir().unwrap();
    let (ir, version) = llvm_ir(&repository(), scratch.path()).unwrap();
    (translate(&ir, PERIOD).unwrap_or_else(|refused| panic!("{refused} ({version})")), version)
}

#[test]
fn what_is_checked_in_is_what_is_generated() {
    let (circuits, version) = circuits();
    let folder = repository().join("hw/rtl/generated");
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
    let known = read("rustc-version");
    let cause = if known.trim() == version {
        "the functions or the translator changed".to_owned()
    } else {
        format!("this is {version}, they were made with {}: another rustc may say the same in other IR", known.trim())
    };
    let mut files: Vec<String> = circuits.iter().map(|circuit| format!("fn_{}.sv", circuit.name)).collect();
    for (circuit, file) in circuits.iter().zip(&files) {
        assert!(
            read(file) == circuit.verilog(),
            "hw/rtl/generated/{file} is not what hw/translate makes: {cause}; run `cargo run -p millrace-translate` and the hardware's tests"
        );
    }
    let mut there: Vec<String> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    there.retain(|name| Path::new(name).extension().is_some_and(|extension| extension == "sv"));
    there.sort();
    files.sort();
    assert_eq!(there, files, "hw/rtl/generated has modules that nothing makes, or lacks some");
}

#[test]
fn graphs_do_what_the_functions_do() {
    let seed = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    println!("seed {seed}");
    let (circuits, _) = circuits();
    assert_eq!(circuits.len(), NATIVE.len());
    for (circuit, native) in circuits.iter().zip(NATIVE) {
        assert_eq!(circuit.name, native.name);
        let names = |ports: Vec<String>| ports;
        assert_eq!(names(circuit.inputs().iter().map(|port| port.name.clone()).collect()), (native.inputs)());
        assert_eq!(names(circuit.outputs().map(|port| port.name.clone()).collect()), (native.outputs)());
        let mut random = Random(seed);
        let mut results = std::collections::HashSet::new();
        for _ in 0..20_000 {
            let mut arguments = native.arguments(&mut random);
            for (argument, port) in arguments.iter_mut().zip(circuit.inputs()) {
                *argument &= crate::graph::ones(port.width) as u64;
            }
            let wanted = (native.run)(&arguments);
            assert_eq!(circuit.evaluate(&arguments), wanted, "{} with {arguments:x?}, seed {seed}", circuit.name);
            results.insert(wanted);
        }
        assert!(results.len() > 1000, "{}: arguments lead to {} results only", circuit.name, results.len());
    }
}

/// Lines that say something to the compiler.
fn code_lines(path: &Path) -> usize {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//")).count()
}

#[test]
fn the_documented_lines_are_counted() {
    let document = fs::read_to_string(repository().join("docs/hardware-functions.md")).unwrap();
    for (name, paper) in [("share", 40), ("throttle", 70), ("replicate", 15), ("cache", 220), ("copy", 570)] {
        let lines = code_lines(&repository().join(format!("crates/functions/src/{name}.rs")));
        let row = format!("| {name} | {lines} | {paper} |");
        assert!(document.contains(&row), "docs/hardware-functions.md does not have the row `{row} …`");
    }
}
