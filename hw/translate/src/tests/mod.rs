//! The translator's own promises: nothing that needs hardware tools.

use std::{
    fs,
    path::{Path, PathBuf},
};

#[allow(clippy::all, clippy::pedantic, dead_code, unreachable_pub, reason = "it is a crate of its own as well")]
mod samples;

use crate::{
    Circuit, FUNCTIONS, PERIOD, Refused, circuit, ir, llvm_ir,
    native::{NATIVE, Random},
    ports::Metadata,
    schedule::Interval,
    translate,
};

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn circuits() -> (Vec<Circuit>, String) {
    let scratch = tempfile::tempdir().unwrap();
    let (ir, version) = llvm_ir(&repository(), FUNCTIONS, scratch.path()).unwrap();
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

/// The circuits of a module of the samples, or why there are none.
fn samples(module: &str, interval: Interval) -> Vec<(String, Result<Circuit, Refused>)> {
    let scratch = tempfile::tempdir().unwrap();
    let (text, _) = llvm_ir(&repository(), "hw/translate/src/tests/samples.rs", scratch.path()).unwrap();
    let metadata = Metadata::new(&text);
    let functions = ir::functions(&text);
    let of_module = functions.iter().filter_map(|function| {
        let name = metadata.function_in(function.subprogram.as_deref()?, module)?;
        Some((name.to_owned(), circuit(name, function, &metadata, interval, PERIOD)))
    });
    of_module.collect()
}

fn number(name: &str, values: &[u64], names: &[&str]) -> u64 {
    values[names.iter().position(|known| *known == name).unwrap()]
}

#[test]
fn samples_do_as_circuits_what_they_do() {
    type Sample = fn(&samples::In, &mut samples::Out);
    let natives: [(&str, Sample); 6] = [
        ("shifts", samples::good::shifts),
        ("orders", samples::good::orders),
        ("counts", samples::good::counts),
        ("sums", samples::good::sums),
        ("walks", samples::good::walks),
        ("leaves", samples::good::leaves),
    ];
    let seed = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    println!("seed {seed}");
    let circuits = samples("good", Interval::One);
    assert_eq!(circuits.len(), natives.len());
    for (name, circuit) in circuits {
        let circuit = circuit.unwrap_or_else(|refused| panic!("{refused}"));
        let native = natives.iter().find(|(known, _)| *known == name).unwrap().1;
        let names: Vec<&str> = circuit.inputs().iter().map(|port| port.name.as_str()).collect();
        let mut random = Random(seed);
        for _ in 0..20_000 {
            let mut values: Vec<u64> = names.iter().map(|_| random.edge()).collect();
            if random.once_in(2) {
                values[0] = number("list_2", &values, &names) & 0xffff;
            }
            for (value, port) in values.iter_mut().zip(circuit.inputs()) {
                *value &= crate::graph::ones(port.width) as u64;
            }
            let of = |name: &str| number(name, &values, &names);
            let list = ["list_0", "list_1", "list_2", "list_3"].map(|name| of(name) as u16);
            let mut out = samples::Out::default();
            native(&samples::In { a: of("a"), b: of("b"), list, c: of("c") as u8 }, &mut out);
            let wanted = vec![out.x, out.y.into(), out.list[0].into(), out.list[1].into(), out.list[2].into()];
            assert_eq!(circuit.evaluate(&values), wanted, "{name} with {names:?} = {values:x?}, seed {seed}");
        }
    }
}

#[test]
fn what_has_no_circuit_is_refused_with_its_place() {
    let reasons = [
        ("unbounded", "a loop is left", false),
        ("divides", "a division", true),
        ("indexes", "an index that is not constant", true),
        ("panics", "a panic", true),
        ("forgets", "does not always write `output.y`", false),
    ];
    let refused = samples("bad", Interval::One);
    assert_eq!(refused.len(), reasons.len());
    for (name, circuit) in refused {
        let (_, reason, placed) = reasons.iter().find(|(known, ..)| *known == name).unwrap();
        let refused = circuit.err().unwrap_or_else(|| panic!("{name} has a circuit"));
        let text = refused.to_string();
        assert!(text.starts_with(&format!("function {name}")) && text.contains(reason), "{text}");
        assert_eq!(refused.place.starts_with("hw/translate/src/tests/samples.rs:"), *placed, "{text}");
        assert_eq!(!refused.instruction.is_empty(), *placed, "{text}");
    }
}
