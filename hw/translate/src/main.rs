//! Makes `hw/rtl/generated/fn_*.sv`, their testbenches, and vectors for them.

use std::{
    fs,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use millrace_translate::{
    Circuit, FUNCTIONS, PERIOD, llvm_ir,
    native::{NATIVE, Random},
    testbench, translate,
};

const USAGE: &str = "usage: millrace-translate                          make hw/rtl/generated/fn_*.sv
       millrace-translate testbench FOLDER         write testbenches tb_*.sv
       millrace-translate vectors NAME COUNT SEED  print vectors for a testbench";

fn circuits(repository: &Path) -> io::Result<(Vec<Circuit>, String)> {
    let scratch = repository.join("target/translate");
    fs::create_dir_all(&scratch)?;
    let (ir, version) = llvm_ir(repository, FUNCTIONS, &scratch)?;
    let circuits = translate(&ir, PERIOD).map_err(|refused| io::Error::other(format!("{refused} ({version})")))?;
    Ok((circuits, version))
}

fn run(arguments: &[&str]) -> io::Result<()> {
    let repository = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (circuits, version) = circuits(&repository)?;
    match arguments {
        [] => {
            let folder = repository.join("hw/rtl/generated");
            for circuit in &circuits {
                fs::write(folder.join(format!("fn_{}.sv", circuit.name)), circuit.verilog())?;
            }
            fs::write(folder.join("rustc-version"), version + "\n")
        }
        ["testbench", folder] => {
            for circuit in &circuits {
                fs::write(Path::new(folder).join(format!("tb_{}.sv", circuit.name)), circuit.testbench())?;
            }
            fs::write(Path::new(folder).join("tb_functions.sv"), testbench::all(&circuits))
        }
        ["vectors", name, count, seed] => {
            let wrong = |what: &str| io::Error::other(format!("{what}\n{USAGE}"));
            let circuit = circuits.iter().find(|circuit| circuit.name == *name).ok_or_else(|| wrong("no such function"))?;
            let native = NATIVE.iter().find(|native| native.name == *name).ok_or_else(|| wrong("no such function"))?;
            let count: u64 = count.parse().map_err(|_| wrong("COUNT is a number"))?;
            let mut random = Random(seed.parse().map_err(|_| wrong("SEED is a number"))?);
            let mut out = BufWriter::new(io::stdout().lock());
            (0..count).try_for_each(|_| writeln!(out, "{}", circuit.vector(native, &mut random)))?;
            out.flush()
        }
        _ => Err(io::Error::other(USAGE)),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("millrace-translate: {why}");
            ExitCode::FAILURE
        }
    }
}
