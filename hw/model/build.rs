//! With the feature `sim`: Verilator turns `hw/rtl/engine.sv` into C++, once for each configuration, which is compiled with the shim.
//!
//! `MILLRACE_VERILATOR` names the program; otherwise it is `target/hw-tools/bin/verilator-cli`, which `scripts/hw-tools` makes.
//! `MILLRACE_SIM` is a list of configurations, cores x disks; otherwise 1x1, 1x2 and 2x2.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "sim")]
    sim::build();
}

#[cfg(feature = "sim")]
mod sim {
    use std::{
        env, fs,
        path::{Path, PathBuf},
        process::Command,
    };

    const USUAL: &str = "1x1,1x2,2x2";
    /// Spaces of FastPath that all of them have.
    const SPACES: u8 = 2;

    pub(super) fn build() {
        let hw = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo says so")).join("..");
        let out = PathBuf::from(env::var("OUT_DIR").expect("cargo says so"));
        for path in ["rtl", "model/sim"] {
            println!("cargo::rerun-if-changed={}", hw.join(path).display());
        }
        println!("cargo::rerun-if-env-changed=MILLRACE_VERILATOR");
        println!("cargo::rerun-if-env-changed=MILLRACE_SIM");
        let verilator = verilator(&hw);
        println!("cargo::rerun-if-changed={}", verilator.display());
        let include = include(&verilator);
        let list = env::var("MILLRACE_SIM").unwrap_or_else(|_| USUAL.to_owned());
        let all: Vec<(u8, u8)> = list.split(',').map(configuration).collect();
        for (cores, ssds) in &all {
            generate(&hw, &out, &verilator, (*cores, *ssds));
            compile(&hw, &out, &include, (*cores, *ssds));
        }
        let runtime = ["verilated.cpp", "verilated_threads.cpp"].map(|file| include.join(file));
        let mut compiler = compiler(&include);
        compiler.define("pthread_getaffinity_np", "millrace_one_processor").define("getrlimit", "millrace_no_limit");
        compiler.files(runtime).file(hw.join("model/sim/alone.cpp")).compile("verilated");
        println!("cargo::rustc-link-lib=atomic");
        fs::write(out.join("built.rs"), table(&all)).expect("OUT_DIR can be written");
    }

    fn configuration(text: &str) -> (u8, u8) {
        let parts = text.trim().split_once('x').and_then(|(cores, ssds)| cores.parse().ok().zip(ssds.parse().ok()));
        match parts {
            Some((cores, ssds)) if (1..=16).contains(&cores) && (1..=16).contains(&ssds) => (cores, ssds),
            _ => panic!("MILLRACE_SIM: {text:?} is no configuration; CORESxDISKS is, 1 to 16 of both, several with commas"),
        }
    }

    fn verilator(hw: &Path) -> PathBuf {
        let tools = hw.join("../target/hw-tools/bin/verilator-cli");
        let path = env::var_os("MILLRACE_VERILATOR").map_or(tools, PathBuf::from);
        path.canonicalize().unwrap_or_else(|error| {
            panic!("{}: {error}; scripts/hw-tools fetches Verilator, or name it in MILLRACE_VERILATOR", path.display())
        })
    }

    fn include(verilator: &Path) -> PathBuf {
        let answer = Command::new(verilator).args(["--getenv", "VERILATOR_ROOT"]).output();
        let answer = answer.unwrap_or_else(|error| panic!("{}: {error}", verilator.display()));
        PathBuf::from(String::from_utf8_lossy(&answer.stdout).trim()).join("include")
    }

    fn name((cores, ssds): (u8, u8)) -> String {
        format!("Engine{cores}x{ssds}")
    }

    fn folder(out: &Path, of: (u8, u8)) -> PathBuf {
        out.join(name(of))
    }

    fn generate(hw: &Path, out: &Path, verilator: &Path, (cores, ssds): (u8, u8)) {
        let folder = folder(out, (cores, ssds));
        // What an earlier engine had and this one has not must not be linked.
        let _ = fs::remove_dir_all(&folder);
        let rtl = hw.join("rtl");
        let mut command = Command::new(verilator);
        command.args(["--cc", "--assert", "-O3", "--x-assign", "fast", "--x-initial", "fast", "--top-module", "engine"]);
        command.args(["--prefix", &name((cores, ssds)), &format!("-GCORES={cores}"), &format!("-GSSDS={ssds}"), "--Mdir"]);
        command.arg(&folder).arg(format!("-GFASTPATH={SPACES}")).arg("-y").arg(&rtl).arg("-y").arg(rtl.join("generated"));
        command.arg(rtl.join("millrace_pkg.sv")).arg(rtl.join("engine.sv"));
        let status = command.status().unwrap_or_else(|error| panic!("{}: {error}", verilator.display()));
        assert!(
            status.success(),
            "Verilator does not take hw/rtl/engine.sv with {cores} cores and {ssds} disks: its message is above"
        );
    }

    fn compiler(include: &Path) -> cc::Build {
        let mut compiler = cc::Build::new();
        compiler.cpp(true).std("c++17").opt_level(2).warnings(false).include(include).include(include.join("vltstd"));
        compiler.define("VL_THREADED", "1").flag_if_supported("-pthread");
        compiler
    }

    fn compile(hw: &Path, out: &Path, include: &Path, of: (u8, u8)) {
        let folder = folder(out, of);
        let files = fs::read_dir(&folder).expect("Verilator made it").map(|entry| entry.expect("a readable folder").path());
        let mut compiler = compiler(include);
        compiler.include(&folder).define("MODEL", name(of).as_str()).define("SSDS", of.1.to_string().as_str());
        // An object of its own name for each configuration's shim.
        let shim = folder.join(format!("shim_{}.cpp", name(of)));
        fs::copy(hw.join("model/sim/shim.cpp"), &shim).expect("OUT_DIR can be written");
        let files: Vec<PathBuf> =
            files.filter(|path| path.extension().is_some_and(|kind| kind == "cpp") && *path != shim).collect();
        compiler.files(files).file(shim).compile(&name(of));
    }

    /// Rust's side of the models.
    fn table(all: &[(u8, u8)]) -> String {
        let mut text = String::from("unsafe extern \"C\" {\n");
        for name in all.iter().copied().map(name) {
            text += &format!(
                "    #[link_name = \"{name}_make\"]\n    fn make_{name}() -> *mut c_void;\n    #[link_name = \"{name}_drop\"]\n    \
                 fn drop_{name}(sim: *mut c_void);\n    #[link_name = \"{name}_cycle\"]\n    \
                 fn cycle_{name}(sim: *mut c_void, inputs: *const In, outputs: *mut Out);\n"
            );
        }
        text += &format!("}}\n\n/// Spaces of FastPath that each has.\npub(super) const SPACES: u8 = {SPACES};\n");
        text += "\n/// The configurations.\npub(super) const BUILT: &[Built] = &[\n";
        for of in all.iter().copied() {
            let ((cores, ssds), name) = (of, name(of));
            text += &format!(
                "    Built {{ cores: {cores}, ssds: {ssds}, make: make_{name}, drop: drop_{name}, cycle: cycle_{name} }},\n"
            );
        }
        text + "];\n"
    }
}
