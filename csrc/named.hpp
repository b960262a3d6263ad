// Named: arguments that are refused by name and rule, where pybind11 would list signatures.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plan/action.hpp"
#include "plan/stage_values.hpp"

namespace pykern {

// The name of an argument, as an argument of templates.
template <std::size_t size>
struct ArgumentName {
    // A literal comes as such an array, and becomes a name by itself.
    // NOLINTNEXTLINE(google-explicit-constructor,*-avoid-c-arrays)
    consteval ArgumentName(const char (&text)[size]) { std::copy_n(text, size, value); }

    char value[size];  // NOLINT(*-avoid-c-arrays): public plain members alone can be such arguments
};

// The words for one value of a type, and for several.
struct Words {
    std::string one;
    std::string many;
};

// Tells the functions below of which type.
template <class T>
struct OfType {};

template <class T>
Words words(OfType<T> /*type*/) {
    const auto name = pybind11::type::of<T>().attr("__name__").template cast<std::string>();
    if (name.back() == 's') return {.one = name, .many = name};
    const bool vowel = std::string("AEIOU").find(name.front()) != std::string::npos;
    return {.one = (vowel ? "an " : "a ") + name, .many = name + "s"};
}

template <class T>
    requires std::is_integral_v<T>
Words words(OfType<T> /*type*/) {
    return {.one = "an int", .many = "ints"};
}

inline Words words(OfType<bool> /*type*/) { return {.one = "True or False", .many = ""}; }
inline Words words(OfType<double> /*type*/) { return {.one = "a number", .many = "numbers"}; }
inline Words words(OfType<std::string> /*type*/) { return {.one = "a string", .many = "strings"}; }
inline Words words(OfType<Kind> /*type*/) { return {.one = "a Kind", .many = "Kinds"}; }
inline Words words(OfType<StageValues> /*type*/) {
    return {.one = "a number or a list of numbers", .many = ""};
}

template <class One, class Other>
Words words(OfType<std::pair<One, Other>> /*type*/) {
    const std::string both = words(OfType<One>{}).one + " and " + words(OfType<Other>{}).one;
    return {.one = "a pair of " + both, .many = "pairs of " + both};
}

template <class T>
Words words(OfType<std::vector<T>> /*type*/) {
    const std::string each = words(OfType<T>{}).many;
    return {.one = "a list of " + each, .many = "lists of " + each};
}

template <class T>
Words words(OfType<std::optional<T>> /*type*/) {
    return {.one = words(OfType<T>{}).one + " or None", .many = ""};
}

// The value in a message, cut where it is long.
std::string shown(pybind11::handle value);

template <class T>
[[noreturn]] void refuse_argument(const std::string& name, pybind11::handle value) {
    if constexpr (std::is_integral_v<T>) {
        using Limits = std::numeric_limits<T>;
        if (PyLong_Check(value.ptr()) != 0) {
            throw pybind11::value_error(name + " must be " + std::to_string(Limits::min()) +
                                        " to " + std::to_string(Limits::max()) + ", got " +
                                        shown(value));
        }
    }
    throw pybind11::type_error(name + " must be " + words(OfType<T>{}).one + ", got " +
                               shown(value));
}

// An argument of a function that Python calls: a T under its name.
template <ArgumentName name, class T>
struct Named {
    T value;
};

// The function, which refuses arguments by these names, one for each.
template <ArgumentName... names, class Result, class... Args>
auto named(Result (*function)(Args...)) {
    static_assert(sizeof...(names) == sizeof...(Args));
    return [function](Named<names, Args>... args) -> Result {
        return function(std::forward<Args>(args.value)...);
    };
}

// As a function for `named`.
template <class T, class... Args>
T made(Args... args) {
    return T(std::move(args)...);
}

}  // namespace pykern

template <pykern::ArgumentName argument, class T>
struct pybind11::detail::type_caster<pykern::Named<argument, T>> {
    using Value = intrinsic_t<T>;
    using Caster = make_caster<T>;
    // The caster of a class takes None for a missing pointer.
    static constexpr bool kIsClass = std::is_base_of_v<type_caster_generic, Caster>;
    // pybind11 looks for this name.
    static constexpr auto name = Caster::name;  // NOLINT(readability-identifier-naming)

    bool load(handle source, bool convert) {
        if ((kIsClass && source.is_none()) || !caster_.load(source, convert)) {
            pykern::refuse_argument<Value>(argument.value, source);
        }
        return true;
    }

    template <class>
    using cast_op_type = pykern::Named<argument, T>;

    // NOLINTNEXTLINE(google-explicit-constructor): pybind11 asks for the value so
    operator pykern::Named<argument, T>() { return {cast_op<T>(std::move(caster_))}; }

   private:
    Caster caster_;
};
