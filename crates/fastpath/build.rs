//! Gives `libmillrace.so` the name by which programs ask for it once they are linked.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The number is that of the C interface: another one as soon as a program of the one before would go wrong with it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmillrace.so.0");
}
